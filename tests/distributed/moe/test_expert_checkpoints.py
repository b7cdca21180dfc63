"""Checkpoints of models with experts: files of each expert, loaded by any layout and stage, whole models, universal."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deepspeed
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.checkpoint.ds_to_universal import parse_arguments
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.distributed.moe.models import EXPERTS, Model, adopt, batches, counterparts, scrambled
from tests.harness import ranks

BEGIN = "first.deepspeed_moe.experts.deepspeed_experts."


@functools.cache
def in_one_piece():
    """The model whose values and names all others have."""
    return scrambled(Model(k=2))


def engine_of(layout, stage, *, bf16=False, data_first=False, **sections):
    model = Model(*layout, k=2)
    adopt(model, in_one_piece(), data_first=data_first)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
        "use_data_before_expert_parallelism": data_first,
        **sections,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps, start=0):
    for step in range(start, start + steps):
        given = batches(step, 0)[dist.get_rank()]
        engine.backward(engine(given.to(next(engine.module.parameters()).dtype)))
        engine.step()


def states(engine, data_first=False):
    """Name in the whole model → master and moment, of what this rank has."""
    found = {}
    for name, mine, _ in counterparts(engine.module, in_one_piece(), engine._parts.layout, data_first=data_first):
        found[name] = safe_get_full_fp32_param(mine), safe_get_full_optimizer_state(mine, "exp_avg")
    return found


def everybody(found):
    """The same of all ranks together."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    return {name: value for each in told for name, value in each.items()}


def check_equal(engine, expected, data_first=False):
    for name, values in states(engine, data_first).items():
        for mine, theirs in zip(values, expected[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)


def shared_folder(name: str) -> Path:
    told = [None]
    if dist.get_rank() == 0:
        told = [tempfile.mkdtemp(prefix=name)]
    dist.broadcast_object_list(told)
    return Path(told[0])


@ranks(4)
def test_any_layout_and_stage_loads():
    folder = shared_folder("experts")
    rounds = [
        ((2, 4), 0, False, "deepspeed", ((4, 1), 2, True)),
        ((4, 2), 2, False, "deepspeed", ((1, 2), 3, False)),
        ((2, 2), 3, True, "deepspeed", ((4, 4), 0, False)),
        ((1, 4), 1, True, "deepspeed", ((2, 1), 1, False)),
        ((4, 2), 0, True, "safetensors", ((2, 1), 3, False)),
        ((2, 4), 3, False, "safetensors", ((1, 4), 2, True)),
        ((2, 1), 1, True, "safetensors", ((4, 2), 0, False)),
    ]
    for number, (layout, stage, data_first, files, (other, then, order)) in enumerate(rounds):
        engine = engine_of(layout, stage, data_first=data_first, checkpoint={"format": files})
        train(engine, 2)
        engine.save_checkpoint(folder, tag=str(number))
        expected = everybody(states(engine, data_first))
        assert set(expected) == set(dict(in_one_piece().named_parameters()))
        if files == "deepspeed":
            masters = get_fp32_state_dict_from_zero_checkpoint(folder, tag=str(number))
            assert set(masters) == set(expected)
            for name, (master, _) in expected.items():
                assert torch.equal(masters[name], master), f"{number} {name}"
        train(engine, 1, start=2)
        continued = everybody(states(engine, data_first))
        engine.destroy()
        loaded = engine_of(other, then, data_first=order)
        train(loaded, 1, start=7)
        loaded.load_checkpoint(folder, tag=str(number))
        check_equal(loaded, expected, order)
        train(loaded, 1, start=2)
        for name, values in states(loaded, order).items():
            for mine, theirs in zip(values, continued[name], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=f"{number} {name}")
        loaded.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@ranks(2)
def test_files_whole_models_and_universal():
    folder = shared_folder("experts")
    engine = engine_of((2, 1), 2, bf16=True)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    expected = everybody(states(engine))
    engine.save_16bit_model(folder / "whole", "model.safetensors")
    names = {path.name for path in (folder / "two").iterdir()}
    for layer in range(2):
        for expert in range(EXPERTS):
            assert f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt" in names
    model = torch.load(folder / "two" / "mp_rank_00_model_states.pt", weights_only=True)
    assert model["num_experts"] == [EXPERTS, EXPERTS]
    assert not any("deepspeed_experts" in name for name in model["module"])
    file = torch.load(folder / "two" / "layer_0_expert_3_mp_rank_00_model_states.pt", weights_only=True)
    assert set(file) == {f"{BEGIN}3.{rest}" for rest in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert torch.equal(file[f"{BEGIN}3.0.weight"], expected[f"{BEGIN}3.0.weight"][0].bfloat16())
    whole = load_file(folder / "whole" / "model.safetensors")
    assert set(whole) == set(Model(k=2).state_dict())
    for name, (master, _) in expected.items():
        assert torch.equal(whole[name], master.bfloat16()), name
    masters = get_fp32_state_dict_from_zero_checkpoint(folder, tag="two")
    assert set(masters) == set(whole)
    assert all(torch.equal(masters[name], master) for name, (master, _) in expected.items())
    if dist.get_rank() == 0:
        arguments = ["--input_folder", str(folder / "two"), "--output_folder", str(folder / "two_universal")]
        to_universal(parse_arguments(arguments))
        (folder / "latest_universal").write_text("two_universal")
    dist.barrier()
    engine.destroy()
    loaded = engine_of((1, 2), 3, bf16=True, checkpoint={"load_universal": True})
    loaded.load_checkpoint(folder)
    check_equal(loaded, expected)
    loaded.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
