"""Checkpoints of ranks that share layers load at any other number of them and any stage; tools see whole tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.formats.consolidate import fp32_weights
from deepspeed.checkpoint.formats.detect import ModelShare, open_checkpoint
from deepspeed.checkpoint.formats.native.reader import NativeSource
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.tensor_parallel import splits_of
from tests.distributed.tensor_parallel.families import assert_close, make, parameters, start, tokens
from tests.harness import ranks, store_path

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_clipping": 1.0}


def folder() -> Path:
    return Path(store_path()).parent / f"{Path(store_path()).name}-checkpoints"


def engine_of(name, tp, stage, **sections):
    model, _ = make(name)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return start(model, tp, zero_optimization=zero, **ADAM, **sections)


def train(engine, steps, seed):
    losses = []
    for step in range(steps):
        axis = engine._parts.layout["dp"]
        batch = tokens(2 * axis.size, seed=seed + step)[2 * axis.rank : 2 * axis.rank + 2]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


@pytest.mark.parametrize("name", ["one key", "gpt2"])
@ranks(4, timeout=300)
def test_any_split_and_stage_loads_at_any_other(name):
    """(tp, stage) that writes → (tp, stage) that goes on as the writer does."""
    for place, (written, read) in enumerate([((2, 1), (4, 3)), ((4, 0), (2, 2)), ((2, 3), (1, 1)), ((1, 2), (2, 3))]):
        form = ("deepspeed", "safetensors")[(place + len(name)) % 2]  # each of them once in either
        writer = engine_of(name, *written, checkpoint={"format": form})
        train(writer, 2, seed=10)
        target = folder() / str(place)
        writer.save_checkpoint(target, tag="a")
        saved, files = parameters(writer), {path.name for path in (target / "a").iterdir()}
        if form == "safetensors":
            assert {f"fragments_00000_{rank:02d}.safetensors" for rank in range(written[0])} <= files
            assert set(open_checkpoint(target / "a").files) <= files, "tools know all of them"
            share = ModelShare(splits=splits_of(writer.module) or None)
            own = open_checkpoint(target / "a", mp_rank=writer._parts.layout["tp"].rank, share=share)
            assert isinstance(own, NativeSource), "a rank that cuts as the writer did reads its own files alone"
        elif written[1] < 3:
            assert {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(written[0])} <= files
        # Another number of data-parallel ranks cuts the batch otherwise, so that one batch of all ranks is compared.
        reader = engine_of(name, *read)
        reader.load_checkpoint(target, tag="a")
        assert_close(parameters(reader), saved, 1e-7)
        source = open_checkpoint(target / "a")
        found = {key: source.read(key, "master").view(source.shapes[key]) for key in saved}
        assert_close(found, saved, 1e-7)
        if writer._parts.layout["dp"].size == reader._parts.layout["dp"].size:
            assert train(reader, 2, seed=20) == pytest.approx(train(writer, 2, seed=20), abs=1e-5)
        moments = {key for group in source.groups for key in group[0]}
        assert all("exp_avg" in source.kinds(key) for key in moments)
        for engine in (writer, reader):
            engine.destroy()
        dist.barrier()


@ranks(2, timeout=300)
def test_whole_weights_leave():
    engine = engine_of("one key", 2, 3)
    train(engine, 1, seed=10)
    expected = parameters(engine)
    target = folder()
    assert engine.save_16bit_model(str(target), "model.safetensors")
    engine.save_checkpoint(target, tag="a")
    whole = engine.module_state_dict()
    assert_close({name: whole[name] for name in expected}, expected, 1e-7)
    dist.barrier()
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        found = load_file(target / "model.safetensors")
        assert_close({name: found[name] for name in expected}, expected, 1e-7)
        read = fp32_weights(open_checkpoint(target / "a"))
        assert_close({name: read[name].contiguous() for name in expected}, expected, 1e-7)
        convert(str(target / "a"), str(target / "universal"))
        source = open_checkpoint(target / "universal")
        values = {name: source.read(name, "master").view(source.shapes[name]) for name in expected}
        assert_close(values, expected, 1e-7)
    dist.barrier()
    other = engine_of("one key", 2, 1)
    before = {name: torch.zeros_like(value) for name, value in expected.items()}
    other.load_module_state_dict(before, strict=False)
    other.load_module_state_dict(whole)
    assert_close(parameters(other), expected, 1e-7)
    if dist.get_rank() == 0:
        (target / "latest_universal").write_text("universal")
    dist.barrier()
    third = engine_of("one key", 2, 2, checkpoint={"load_universal": True})
    third.load_checkpoint(target, tag="universal")
    assert_close(parameters(third), expected, 1e-7)
    assert os.path.isdir(target / "universal" / "zero")
