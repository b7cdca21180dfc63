"""The whole model out of an engine and into it, at every stage, against the plain module's state dict."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.shard import shards_of
from tests.harness import shared_ranks
from tests.models import Tiny, batches, make, share

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = (0, 1, 2, 3)


class Mixed(Tiny):
    """With a frozen layer, buffers of both kinds and a module that names its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.extra.requires_grad_(False)
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("dropped", torch.arange(3), persistent=False)

    def forward(self, tokens, labels):
        return super().forward(tokens, labels) + 0 * self.extra.weight.sum()


def build(stage, precision="fp32", model=None, **zero):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    engine, *_ = deepspeed.initialize(
        model=make(Mixed) if model is None else model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, **zero},
            **section,
        },
    )
    return engine


def plain(precision="fp32", seed=0):
    """The state dict that a model without any sharding has."""
    engine = build(0, precision, make(Mixed, seed=seed))
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return state


def same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_the_whole_model_on_rank_0(precision):
    expected = plain(precision)
    for stage in STAGES:
        engine = build(stage, precision)
        for call in (
            engine.zero3_consolidated_16bit_state_dict,
            engine._zero3_consolidated_16bit_state_dict,
            engine._consolidated_16bit_state_dict,
        ):
            found = call()
            if dist.get_rank():
                assert found is None
                continue
            same(found, expected)
            assert found["head.weight"] is found["embedding.weight"]
            assert all(value.device.type == "cpu" for value in found.values())
            own = {value.untyped_storage().data_ptr() for value in engine.module.state_dict().values()}
            assert not own & {value.untyped_storage().data_ptr() for value in found.values()}
            assert all(v.untyped_storage().nbytes() == v.nbytes for v in found.values())
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if not dist.get_rank():
            assert set(expected) - set(trained) == {"extra.weight", "extra.bias"}
        engine.destroy()


@shared_ranks(1, 2)
def test_one_module_is_whole_at_a_time():
    engine = build(3, stage3_param_persistence_threshold=0)
    shards = shards_of(engine.module.parameters())
    most = []
    gather = fetch.gather

    def counted(wanted):
        gather(wanted)
        most.append(sum(shard.numel for shard in shards if shard.whole))

    fetch.gather = counted
    try:
        engine._zero3_consolidated_16bit_state_dict()
    finally:
        fetch.gather = gather
    if dist.get_world_size() > 1:
        assert max(most) <= max(sum(p.ds_numel for p in m.parameters(recurse=False)) for m in engine.module.modules())
        assert not any(shard.whole for shard in shards if shard.numel)
    engine.destroy()


@shared_ranks(1, 2)
def test_state_dict_of_the_module():
    expected = plain()
    for stage in STAGES:
        engine = build(stage)
        same(engine.module_state_dict(), expected)
        prefixed = engine.module_state_dict(prefix="model.", exclude_frozen_parameters=True)
        assert set(prefixed) == {f"model.{name}" for name in expected if not name.startswith("extra.")}
        into = {"there": torch.zeros(1)}
        assert engine.module_state_dict(destination=into) is into
        assert set(into) == {"there", *expected}
        assert engine.module_state_dict(keep_vars=True)["up.weight"] is engine.module.up.weight
        engine.destroy()


@pytest.mark.parametrize("fetch_first", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 3)
def test_load_whole_values(precision, fetch_first):
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = plain(precision, seed=5)
    expected["kept"] = torch.tensor([7, 8, 9])
    wide = {name: v.float() if v.is_floating_point() else v for name, v in plain("fp32", seed=5).items()}
    for stage in STAGES:
        engine = build(stage, precision)
        given = expected if rank == 0 or not (fetch_first and stage == 3) or world == 1 else {}
        engine.load_module_state_dict({"module": given}, fetch_z3_params=fetch_first)
        same(engine.module_state_dict(), expected)
        master = safe_get_full_fp32_param(engine.module.up.weight)
        assert torch.equal(master, wide["up.weight"].to(DTYPES[precision]).float())
        # and training goes on from there
        if precision == "fp32":
            engine.backward(engine(*share(batches(1, 2 * world)[0], rank, world)))
            engine.step()
            moved = engine.module_state_dict()["up.weight"] - expected["up.weight"]
            assert 0 < moved.abs().max() < 0.011
        engine.destroy()


@shared_ranks(1, 2)
def test_what_does_not_fit():
    good = plain()
    for stage in STAGES:
        engine = build(stage)
        before = engine.module_state_dict()
        lacking = {name: value for name, value in good.items() if name != "up.weight"}
        with pytest.raises(RuntimeError, match=r"missing: up\.weight.*strict=False"):
            engine.load_module_state_dict(lacking)
        engine.load_module_state_dict(lacking, strict=False)
        engine.load_module_state_dict(lacking, allowed_missing_keys={"up.weight"})
        with pytest.raises(RuntimeError, match=r"not in the model: odd"):
            engine.load_module_state_dict({**good, "odd": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=r"up\.weight.*shape|size mismatch for up\.weight"):
            engine.load_module_state_dict({**good, "up.weight": torch.zeros(3)}, strict=False)
        same(engine.module_state_dict(), before)
        engine.destroy()


@shared_ranks(2)
def test_only_some_parameters():
    engine = build(3, stage3_param_persistence_threshold=0)
    before, other = engine.module_state_dict(), plain(seed=5)
    engine.load_module_state_dict(other, z3_params_to_fetch=[engine.module.up.weight])
    after = engine.module_state_dict()
    assert torch.equal(after["up.weight"], other["up.weight"])
    assert torch.equal(after["down.weight"], before["down.weight"])
    engine.destroy()


@shared_ranks(1, 2)
def test_a_function_of_the_user_loads():
    def half(src, dst):
        with torch.no_grad():
            for name, param in dst.named_parameters():
                param.copy_(src[name] / 2)

    other = plain(seed=5)
    for stage in STAGES:
        engine = build(stage)
        engine.load_module_state_dict(other, custom_load_fn=half)
        assert torch.equal(engine.module_state_dict()["up.weight"], other["up.weight"] / 2)
        assert torch.equal(safe_get_full_fp32_param(engine.module.up.weight), other["up.weight"] / 2)
        engine.destroy()


@shared_ranks(1, 2)
def test_save_16bit_model(tmp_path):
    expected = plain("bf16")
    for stage in STAGES:
        engine = build(stage, "bf16", stage3_gather_16bit_weights_on_model_save=True)
        folder = tmp_path / str(stage)
        assert engine.save_16bit_model(str(folder)) is True
        assert engine.save_fp16_model(str(folder), "old.bin") is True
        assert engine.save_16bit_model(str(folder), "model.safetensors") is True
        assert engine.save_16bit_model(str(folder), "part.safetensors", max_shard_size=700) is True
        assert engine.save_16bit_model(str(folder), "part.bin", max_shard_size=700, exclude_frozen_parameters=True)
        for name in ("pytorch_model.bin", "old.bin"):
            same(torch.load(folder / name, weights_only=True), expected)
        found = read_safetensors(folder / "model.safetensors")
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        index = json.loads((folder / "part.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(expected)
        files = set(index["weight_map"].values())
        assert len(files) > 1
        for file in files:
            part = read_safetensors(folder / file)
            assert sum(value.nbytes for value in part.values()) <= 700 or len(part) == 1
            assert all(torch.equal(value, expected[name]) for name, value in part.items())
        parts = json.loads((folder / "part.bin.index.json").read_text())["weight_map"]
        assert {"extra.weight", "extra.bias"} == set(expected) - set(parts)
        for name, file in parts.items():
            assert torch.equal(torch.load(folder / file, weights_only=True)[name], expected[name])
        engine.destroy()


def read_safetensors(path):
    """The format, read by its description."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[begin + start : begin + stop]), dtype=kinds[entry["dtype"]])
        found[name] = flat.view(entry["shape"])
    return found


@shared_ranks(1, 2)
def test_stage_3_writes_unless_it_is_forbidden_to_gather(tmp_path):
    engine = build(3)
    assert engine.save_16bit_model(str(tmp_path)) is True
    assert (tmp_path / "pytorch_model.bin").exists()
    engine.destroy()
    engine = build(3, stage3_gather_16bit_weights_on_model_save=False)
    with pytest.raises(DeepSpeedConfigError, match=r"zero_optimization\.stage3_gather_16bit_weights_on_model_save"):
        engine.save_16bit_model(str(tmp_path), "other.bin")
    assert not (tmp_path / "other.bin").exists()
    engine.destroy()


@shared_ranks(2)
def test_all_ranks_learn_that_writing_failed(tmp_path):
    engine = build(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="rank 0"):
        engine.save_16bit_model(os.path.join(str(tmp_path), "file", "below"))
    dist.barrier()
    engine.destroy()


@pytest.mark.parametrize("persistent", [0, 10, 10**6])
@shared_ranks(1, 2)
def test_empty_partition_cache(persistent):
    """Everything is freed, also parameters that stay whole, and returns before it is used."""
    engine = build(3, stage3_param_persistence_threshold=persistent, stage3_max_reuse_distance=10**9)
    batch = share(batches(1, 4)[0], dist.get_rank(), 2)
    losses = []
    for _ in range(3):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.empty_partition_cache()
        if dist.get_world_size() > 1:
            assert not any(shard.whole for shard in shards_of(engine.module.parameters()) if shard.numel)
    loss = engine(*batch)
    engine.empty_partition_cache()
    engine.backward(loss)
    engine.empty_partition_cache()
    engine.step()
    losses.append(loss.item())
    engine.empty_partition_cache()
    with torch.no_grad():
        part = engine.module.up(torch.ones(2, 8))  # a module by itself
    other = build(3, stage3_param_persistence_threshold=0)
    for expected in losses:
        loss = other(*batch)
        other.backward(loss)
        other.step()
        assert loss.item() == expected
    with torch.no_grad():
        assert torch.equal(part, other.module.up(torch.ones(2, 8)))
    engine.destroy()
    other.destroy()
