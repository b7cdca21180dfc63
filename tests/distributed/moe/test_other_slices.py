"""Checkpoints of models whose layers tensor-parallel ranks share, and experts that are dealt to these or split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.runtime.saving.training_state import splits_in_files
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.distributed.moe.models import WIDTH, Model, batches
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

EXPERT = r".*deepspeed_experts\.\d+\."


@dataclass(frozen=True)
class Way:
    """How a model is spread over four ranks."""

    tensor: int
    sizes: tuple[int, int]
    stage: int
    split: bool = False
    """The experts are split over tensor-parallel ranks."""


def engine_of(way, seed=0):
    torch.manual_seed(seed)
    expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    model = Model(*way.sizes, expert=expert, k=2, enable_expert_tensor_parallelism=way.split)
    specs = [
        {"patterns": ["^inward\\.weight$"], "partition_type": "column", "gather_output": True},
        *([{"patterns": [f"{EXPERT}0\\.weight"], "partition_type": "column"}] if way.split else []),
        *([{"patterns": [f"{EXPERT}2\\.weight"], "partition_type": "row"}] if way.split else []),
        {"patterns": [".*"], "partition_type": "skip"},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": way.stage, "stage3_param_persistence_threshold": 0},
    }
    if way.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": way.tensor, "partition_config": {"layer_specs": specs}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    train(engine, seed)
    return engine


def train(engine, step):
    data = engine._parts.layout["dp"]
    engine.backward(engine(batches(step, 0)[data.rank]))
    engine.step()


def whole_states(engine):
    """Name in the whole model → master and moment, put together of what all ranks have."""
    parts = engine._parts
    tensor, splits, own = parts.layout["tp"], splits_in_files(parts), {}
    for name, param in engine.module.named_parameters():
        values = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
        own[parts.name_of(name)] = values, splits.get(parts.name_of(name))
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (tensor.rank, own))
    found = {}
    for name in {name for _, each in told for name in each}:
        parts_of = {rank: each[name] for rank, each in told if name in each}
        split = next(iter(parts_of.values()))[1]
        for kind in range(2):
            values = [parts_of[rank][0][kind] for rank in sorted(parts_of)]
            found.setdefault(name, []).append(values[0] if split is None else split.join(values))
    return found


def check_equal(found, expected):
    assert set(found) == set(expected)
    for name, values in found.items():
        for mine, theirs in zip(values, expected[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)


@ranks(4)
def test_other_slices_load():
    folder = shared_folder("slices")
    for number, (before, after) in enumerate(
        [
            (Way(2, (4, 1), 0), Way(1, (2, 4), 1)),
            (Way(2, (2, 4), 2), Way(4, (4, 2), 0)),
            (Way(2, (1, 4), 3), Way(2, (2, 1), 1)),
            (Way(2, (2, 1), 1, split=True), Way(4, (1, 1), 0, split=True)),
            (Way(1, (4, 2), 3), Way(2, (2, 1), 2, split=True)),
        ]
    ):
        tag = f"of{number}"
        engine = engine_of(before)
        engine.save_checkpoint(folder, tag=tag)
        expected = whole_states(engine)
        engine.destroy()
        masters = get_fp32_state_dict_from_zero_checkpoint(folder, tag=tag)
        assert set(masters) == set(expected)
        assert all(torch.equal(masters[name], values[0]) for name, values in expected.items()), tag
        if dist.get_rank() == 0 and number % 2:
            convert(folder / tag, folder / f"universal{number}", workers=1)
        dist.barrier()
        engine = engine_of(after, seed=3)
        engine.load_checkpoint(folder, tag=tag)
        check_equal(whole_states(engine), expected)
        if number % 2:
            train(engine, 5)
            engine.load_checkpoint(folder, tag=f"universal{number}")
            check_equal(whole_states(engine), expected)
        engine.destroy()
