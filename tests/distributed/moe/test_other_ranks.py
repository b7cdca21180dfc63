"""Checkpoints of experts on another number of ranks, and of experts that tensor-parallel ranks split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import CheckpointError
from deepspeed.parallel import LayoutMpu, ParallelLayout
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.distributed.moe.models import Model, batches
from tests.distributed.moe.test_expert_checkpoints import check_equal, engine_of, everybody, states, train
from tests.distributed.moe.test_tensor_parallel import Case, SplitExpert
from tests.harness import ranks

WAYS = {"a": ((4, 2), 0), "b": ((2, 4), 1), "c": ((4, 1), 2), "d": ((2, 4), 3)}  # tag → sizes, stage
OTHERS = {"a": ((1, 2), 3), "b": ((2, 1), 0), "c": ((2, 2), 1), "d": ((1, 2), 2)}


def write(folder, ways):
    for tag, (sizes, stage) in ways.items():
        engine = engine_of(sizes, stage)
        train(engine, 1)
        engine.save_checkpoint(folder, tag=tag)
        found = everybody(states(engine))
        if dist.get_rank() == 0:
            torch.save(found, f"{folder}/{tag}.pt")
        engine.destroy()


def read(folder, ways):
    for tag, (sizes, stage) in ways.items():
        engine = engine_of(sizes, stage)
        train(engine, 1, start=7)
        engine.load_checkpoint(folder, tag=tag)
        check_equal(engine, torch.load(f"{folder}/{tag}.pt"))
        engine.destroy()


@ranks(4)
def many_write(folder):
    write(folder, WAYS)


@ranks(2)
def few_read_and_write(folder):
    read(folder, OTHERS)
    write(folder, {"e": ((2, 1), 3), "f": ((1, 2), 1)})


@ranks(4)
def many_read(folder):
    read(folder, {"e": ((4, 2), 2), "f": ((2, 4), 3)})


def test_any_number_of_ranks_loads(tmp_path):
    many_write(folder=str(tmp_path))
    few_read_and_write(folder=str(tmp_path))
    many_read(folder=str(tmp_path))


def split_engine(case, layout, seed=0):
    expert = SplitExpert(layout["tp"]) if case.split else None
    model = Model(case.first, case.second, expert=expert, k=2, enable_expert_tensor_parallelism=case.split)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 20},
    }
    torch.manual_seed(seed + layout["tp"].rank)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=LayoutMpu(layout))
    engine.backward(engine(batches(0, 0)[layout["dp"].rank]))
    engine.step()
    return engine


def split_states(engine):
    """Name in the whole model → master and moment of this tensor-parallel rank's part."""
    return {
        engine._parts.experts.name_of(name): (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
        )
        for name, param in engine.module.named_parameters()
    }


@ranks(4)
def test_experts_that_are_split(tmp_path):
    """Another expert-parallel size and stage reads them, with as many tensor-parallel ranks."""
    with ParallelLayout.build(tp=2) as layout:
        for tag, before, after in (
            ("x", Case(2, 1, 0, True), Case(1, 2, 3, True)),
            ("y", Case(1, 2, 3, True), Case(2, 2, 1, True)),
        ):
            engine = split_engine(before, layout)
            engine.save_checkpoint(tmp_path, tag=tag)
            told = [None] * 4
            dist.all_gather_object(told, (layout["tp"].rank, split_states(engine)))
            expected = {name: value for rank, each in told if rank == layout["tp"].rank for name, value in each.items()}
            engine.destroy()
            engine = split_engine(after, layout, seed=100)
            engine.load_checkpoint(tmp_path, tag=tag)
            for name, values in split_states(engine).items():
                torch.testing.assert_close(values, expected[name], rtol=0, atol=0, msg=f"{tag} {name}")
            engine.destroy()
        model = Model(4, 2, k=2)
        model.second.enable_expert_tensor_parallelism = True
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=LayoutMpu(layout))
        with pytest.raises(CheckpointError, match="are dealt to tensor-parallel ranks and others are split over them"):
            engine.save_checkpoint(tmp_path, tag="z")
