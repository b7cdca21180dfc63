"""torch's fake process group, in which one process plays one of many ranks: an engine works there, alone."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed.checkpoint.storage.rank_meeting import SingleRank, default_exchange
from deepspeed.errors import CheckpointError
from tests.harness import ranks


def build(stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 2])
@ranks(1, init=False)
def test_training_and_saving(stage, rank, tmp_path):
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    engine = build(stage)
    assert engine.world_size == 4
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    assert engine.save_checkpoint(tmp_path)
    assert any(f"rank_{rank}" in name for name in os.listdir(tmp_path / "global_step2"))
    engine.destroy()


@ranks(1, init=False)
def test_without_a_store():
    dist.init_process_group("fake", rank=0, world_size=4)
    assert isinstance(default_exchange(), SingleRank)
    build(3).destroy()


@ranks(1, init=False)
def test_a_load_tells_what_the_other_ranks_did_not_write(tmp_path):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    whole, sharded = build(0), build(1)
    whole.save_checkpoint(tmp_path / "whole")
    assert whole.load_checkpoint(tmp_path / "whole")[0] is not None
    sharded.save_checkpoint(tmp_path / "sharded")
    with pytest.raises(CheckpointError, match="written by 4 ranks, but there are optimizer files of ranks \\[0\\]"):
        sharded.load_checkpoint(tmp_path / "sharded")


@pytest.mark.parametrize("world", [8, 1024])
@ranks(1, init=False)
def test_a_block_is_one_gather_in_each_pass(world):
    """However large the part of each parameter is that a rank sends."""
    width, blocks = 2304, 2
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    layers = [nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(blocks)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "comms_logger": {"enabled": True},
    }
    engine = deepspeed.initialize(model=nn.Sequential(*layers), config=config)[0]
    for _ in range(3):
        before = _gathers()
        engine.backward(engine(torch.ones(1, width)).sum())
        engine.step()
    assert _gathers() - before <= 2 * blocks
    engine.destroy()


def _gathers():
    found = deepspeed.comm.comms_logger.comms_dict
    return sum(entry[0] for name, sizes in found.items() if "gather" in name for entry in sizes.values())
