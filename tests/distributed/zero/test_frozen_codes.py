"""Frozen weights that rest as codes: what they take, what they mean, and who may change them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm.codec import codec_of
from deepspeed.errors import UsageError
from deepspeed.zero import GatheredParameters
from deepspeed.zero.parameters.shard import shard_of
from tests.covering import pairs
from tests.harness import shared_ranks

WIDTH = 64


class Adapted(nn.Module):
    """A frozen matrix with a small trained one beside it, twice."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).requires_grad_(False)
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for base, more in zip(self.base, self.more, strict=True):
            x = torch.tanh(base(x)) + more(x)
        return x.float().square().mean()


def model():
    torch.manual_seed(0)
    return Adapted()


def engine_of(net, precision="fp32", **zero):
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, **zero},
        **sections,
    }
    return deepspeed.initialize(model=net, config=config)[0]


def train(engine, steps=3):
    made, told = torch.Generator().manual_seed(dist.get_rank()), []
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        loss = engine(torch.randn(2, WIDTH, generator=made).to(dtype))
        engine.backward(loss)
        engine.step()
        told.append(loss.item())
    return torch.tensor(told)


def rounded(value, chunks, codec):
    """What is left of a matrix whose chunks are encoded."""
    rows = value.reshape(chunks, -1)
    return codec.decode(codec.encode(rows), torch.empty_like(rows)).view(value.shape)


def whole(param):
    with GatheredParameters(param):
        return param.detach().clone()


@shared_ranks(2)
def test_trains_as_with_weights_that_were_rounded(tmp_path):
    """The same losses as with frozen weights that have the values of the codes; a quarter of fp32's memory."""
    world, dtypes = 2, {"fp32": torch.float32, "bf16": torch.bfloat16}
    ways = {
        "plain": {},
        "qwz": {"zero_quantized_weights": True},
        "cpu": {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}},
        "nvme": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    for precision, form, way in pairs(list(dtypes), ("int8", "fp8", "int4"), list(ways)):
        row = f"{precision} {form} {way}"
        codec, dtype = codec_of({"fp8": "fp8_e4m3"}.get(form, form)), dtypes[precision]
        plain = model()
        for layer in plain.base:
            layer.weight.data = rounded(layer.weight.data.to(dtype), world, codec).float()
        zero = {**ways[way], "zero_quantized_weights_format": form}
        expected = train(engine_of(plain, precision, **zero))
        engine = engine_of(model(), precision, **zero, zero_quantized_nontrainable_weights=True)
        shard = shard_of(engine.module.base[0].weight)
        assert (shard.stored.dtype, shard.stored.numel()) == (torch.uint8, codec.nbytes(WIDTH * WIDTH // world)), row
        assert shard_of(engine.module.more[0].weight).codec is None
        found = train(engine)
        tolerance = 1e-2 if way == "qwz" else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=lambda text, row=row: f"{row}: {text}")
        engine.destroy()


@shared_ranks(2)
def test_codes_travel_and_edits_count(tmp_path):
    engine = engine_of(model(), zero_quantized_nontrainable_weights=True)
    train(engine, 1)
    sent = []
    with comm.dispatcher.events.subscribe(comm.CollectiveFinished, sent.append):
        train(engine, 1)
    codec = codec_of("int8")
    coded = [event.bytes for event in sent if event.codec == "int8"]
    each = codec.nbytes(WIDTH * WIDTH // 2)
    assert sum(coded) >= 2 * each  # two matrices
    assert sum(coded) % each == 0
    weight = engine.module.base[0].weight
    value = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.copy_(value)
    torch.testing.assert_close(whole(weight), rounded(value, 2, codec), rtol=0, atol=0)
    engine.save_checkpoint(str(tmp_path), tag="one")
    expected = train(engine)
    other = engine_of(model(), zero_quantized_nontrainable_weights=True)
    other.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(whole(other.module.base[0].weight), rounded(value, 2, codec), rtol=1e-6, atol=1e-7)
    made = train(other)
    assert torch.isfinite(made).all()
    assert expected.shape == made.shape
    engine.offload_states()
    engine.reload_states()
    torch.testing.assert_close(whole(weight), rounded(value, 2, codec), rtol=0, atol=0)


@shared_ranks(2)
def test_later_frozen_and_unfrozen():
    net = model()
    later = net.base[1].weight.requires_grad_(True)
    trained = [net.more[0].weight, net.more[1].weight]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "zero_quantized_nontrainable_weights": True,
        },
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=net, model_parameters=None, optimizer=torch.optim.AdamW(trained, lr=0.1), config=config
    )
    train(engine, 1)
    before = whole(later)
    assert shard_of(later).codec is None
    later.requires_grad_(False)
    net.more[0].weight.requires_grad_(False)
    optimizer.quantize_nontrainable_params()
    assert shard_of(later).codec == codec_of("int8")
    assert shard_of(net.more[0].weight).codec is None  # the optimizer has states of it
    torch.testing.assert_close(whole(later), rounded(before, 2, codec_of("int8")), rtol=0, atol=0)
    train(engine, 1)
    base = net.base[0].weight
    base.requires_grad_(True)
    optimizer.add_param_group({"params": [base]})
    assert shard_of(base).codec is None
    values = whole(base)
    train(engine, 1)
    assert not torch.equal(whole(base), values)
    plain = engine_of(model())
    with pytest.raises(UsageError, match=r"set zero_optimization\.zero_quantized_nontrainable_weights"):
        plain.optimizer.quantize_nontrainable_params()


@shared_ranks(1)
def test_one_rank_rests_too():
    net = model()
    codec = codec_of("int8")
    expected = rounded(net.base[0].weight.detach(), 1, codec)
    engine = engine_of(net, zero_quantized_nontrainable_weights=True)
    assert shard_of(net.base[0].weight).stored.numel() == codec.nbytes(WIDTH * WIDTH)
    assert torch.isfinite(train(engine)).all()
    assert net.base[0].weight.numel() == 0
    torch.testing.assert_close(whole(net.base[0].weight), expected, rtol=0, atol=0)
