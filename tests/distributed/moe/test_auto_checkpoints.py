"""Checkpoints of models whose experts the config has spread: any size, stage and format loads them, as wholes."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deepspeed
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.errors import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.distributed.moe.models import EXPERTS, WIDTH, StackedModel, batches
from tests.distributed.moe.test_expert_checkpoints import shared_folder
from tests.harness import ranks

OFF = 0


def engine_of(size, stage, *, bf16=False, frozen=False, **sections):
    torch.manual_seed(0)
    model = StackedModel()
    model.experts.requires_grad_(not frozen)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": bf16},
        "expert_parallel": {"enabled": size != OFF, "autoep_size": max(size, 1)},
        **sections,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps, start=0):
    for step in range(start, start + steps):
        given = batches(step, 0, tokens=3)[dist.get_rank()]
        engine.backward(engine(given.to(next(engine.module.parameters()).dtype)))
        engine.step()


def states(engine):
    """Name → master and moment of the whole parameter, on every rank."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = [safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    experts = engine._parts.experts
    if experts is None:
        return found
    axis = experts.layers[0].groups.ep
    for name in experts.slices:
        found[name] = [torch.cat([told[rank][name][kind] for rank in axis.ranks]) for kind in range(2)]
    return found


def check_equal(mine, theirs, **tolerance):
    assert set(mine) == set(theirs)
    for name, values in mine.items():
        for here, there in zip(values, theirs[name], strict=True):
            torch.testing.assert_close(here, there, msg=name, **(tolerance or {"rtol": 0, "atol": 0}))


@ranks(4)
def test_any_size_and_stage_loads():
    folder = shared_folder("stacked")
    rounds = [
        ((2, 0, False), (4, 2, True)),
        ((4, 2, False), (OFF, 3, False)),
        ((2, 3, True), (4, 0, False)),
        ((4, 1, True), (2, 3, False)),
        ((OFF, 3, False), (2, 2, False)),
        ((2, 2, True), (4, 3, False)),
        ((4, 0, False), (OFF, 1, False)),
    ]
    for number, ((size, stage, order), (other, then, swapped)) in enumerate(rounds):
        files = {"format": "deepspeed" if number < 5 else "safetensors"}
        engine = engine_of(size, stage, use_data_before_expert_parallelism=order, checkpoint=files)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=str(number))
        expected = states(engine)
        train(engine, 1, start=2)
        continued = states(engine)
        engine.destroy()
        loaded = engine_of(other, then, use_data_before_expert_parallelism=swapped)
        train(loaded, 1, start=7)
        loaded.load_checkpoint(folder, tag=str(number))
        check_equal(states(loaded), expected)
        train(loaded, 1, start=2)
        check_equal(states(loaded), continued, rtol=1e-4, atol=1e-6)
        loaded.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@ranks(2)
def test_frozen_experts_are_kept_or_left_out():
    """Whoever trains adapters leaves them out: the files then know nothing of these experts."""
    folder = shared_folder("frozen")
    for stage in (0, 3):
        engine = engine_of(2, stage, frozen=True)
        train(engine, 1)
        engine.save_checkpoint(folder, tag=str(stage), exclude_frozen_parameters=True)
        engine.load_checkpoint(folder, tag=str(stage), load_module_strict=False)
        with pytest.raises(CheckpointError, match=r"not in the checkpoint: experts\.down_proj"):
            engine.load_checkpoint(folder, tag=str(stage))
        assert set(get_fp32_state_dict_from_zero_checkpoint(folder, tag=str(stage))) == {"gate.weight", "gate.bias"}
        engine.destroy()
    rounds = [(2, 2, 3, "deepspeed"), (2, 3, 2, "deepspeed"), (1, 3, 2, "deepspeed"), (2, 3, 0, "safetensors")]
    for size, stage, other, format in rounds:
        engine = engine_of(size, stage, frozen=True, checkpoint={"format": format})
        train(engine, 1)
        engine.save_checkpoint(folder, tag=f"with{stage}")
        whole = engine.module_state_dict()
        engine.destroy()
        for left_out in (False, True) if format == "deepspeed" else ():
            found = get_fp32_state_dict_from_zero_checkpoint(
                folder, tag=f"with{stage}", exclude_frozen_parameters=left_out
            )
            assert ("experts.down_proj" in found) != left_out, sorted(found)
            wrong = [name for name, value in found.items() if not torch.equal(value, whole[name])]
            assert wrong == [], f"stage {stage}"
        loaded = engine_of(OFF, other, frozen=True)
        loaded.load_module_state_dict({name: value + 1 for name, value in whole.items()})
        loaded.load_checkpoint(folder, tag=f"with{stage}")
        for name, value in loaded.module_state_dict().items():
            assert torch.equal(value, whole[name]), f"{name} of stage {stage}"
        loaded.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@ranks(2)
def test_whole_models_and_universal():
    folder = shared_folder("stacked")
    for stage in (0, 2, 3):
        engine = engine_of(2, stage, bf16=True)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=f"of{stage}")
        expected = states(engine)
        engine.save_16bit_model(folder / f"whole{stage}", "model.safetensors")
        source = open_checkpoint(folder / f"of{stage}")
        assert source.shapes["experts.down_proj"] == (EXPERTS, WIDTH, WIDTH)
        assert set(source.shapes) == set(expected)
        masters = get_fp32_state_dict_from_zero_checkpoint(folder, tag=f"of{stage}")
        assert set(masters) == set(expected)
        whole = load_file(folder / f"whole{stage}" / "model.safetensors")
        assert set(whole) == set(expected)
        for name, (master, _) in expected.items():
            assert torch.equal(whole[name], master.bfloat16()), name
            assert torch.equal(source.read(name, "master").view(master.shape), master), name
            if stage:  # without ZeRO the script takes the weights as the model has them
                assert torch.equal(masters[name], master), name
        everywhere = engine.module_state_dict()
        assert all(torch.equal(everywhere[name], value) for name, value in whole.items())
        doubled = {name: 2 * value for name, value in everywhere.items()}
        engine.load_module_state_dict(doubled)
        assert all(torch.equal(doubled[name], value) for name, value in engine.module_state_dict().items())
        if dist.get_rank() == 0:
            convert(folder / f"of{stage}", folder / f"universal{stage}")
        dist.barrier()
        engine.destroy()
        for size in (2, OFF):
            loaded = engine_of(size, 3 - stage, bf16=True)
            loaded.load_checkpoint(folder, tag=f"universal{stage}")
            check_equal(states(loaded), expected)
            loaded.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
