"""What an engine says when a device runs out of memory, and the ranges that it leaves in traces."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.out_of_memory import REST, alive, changes
from tests.harness import shared_ranks

SAID = "CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has a total capacity of 1.00 KiB"


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError(SAID)


class Model(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(64, 64), where
        self.register_buffer("table", torch.zeros(32))

    def forward(self, x):
        if self.where == "forward":
            raise torch.OutOfMemoryError(SAID)
        x = self.layer(x)
        return (_Fails.apply(x) if self.where == "backward" else x).float().square().mean()


def engine_of(where, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        **sections,
    }
    return deepspeed.initialize(model=Model(where), config=config)[0]


def step(engine):
    loss = engine(torch.randn(4, 64, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()


@shared_ranks(1)
def test_the_error_tells_what_was_alive_and_what_to_change():
    for where in ("forward", "backward"):
        engine = engine_of(where)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(engine)
        text = str(caught.value)
        assert text.startswith(SAID)
        module = " of the model (Model)" if where == "forward" else ""
        assert f"What was alive on cpu in {where}{module}:" in text
        assert text.count("What was alive") == 1
        assert all(kind in text for kind in ("parameters", "gradients", "masters", "moments", "buffers", REST))
        assert '"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2' in text
        assert "ds_plan SCRIPT CONFIG --world 1 --memory " in text
        assert text.rstrip().endswith("--advise")
        engine.destroy()


@shared_ranks(2)
def test_bytes_by_kind_and_what_would_free_them():
    numel = 64 * 64 + 64
    engine = engine_of("nowhere")
    step(engine)
    held = alive(engine._parts)
    assert (held["parameters"], held["masters"], held["moments"]) == (2 * numel, 4 * numel, 8 * numel)
    assert held["buffers of the model"] > 0
    spread = changes(engine._parts, {**held, REST: 0}, 12 * numel // 2)
    assert spread[0].startswith('"zero_optimization": {"stage": 1}')
    assert any("offload_optimizer" in line for line in changes(engine._parts, {**held, REST: 0}, 12 * numel))
    assert len(changes(engine._parts, held, 2**60)) == 3  # nothing is enough: what frees most
    engine.destroy()
    engine = engine_of("nowhere", zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    assert not any("offload_optimizer" in line for line in changes(engine._parts, alive(engine._parts), 0))
    engine.destroy()


@shared_ranks(1)
def test_a_smaller_micro_batch_leaves_the_batch_of_a_step_as_it_is():
    for micro, smaller, steps in ((2, 1, 4), (3, 1, 6), (5, 1, 10), (6, 3, 4), (9, 3, 6)):
        engine = engine_of("nowhere", train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=2)
        advice = changes(engine._parts, {**alive(engine._parts), REST: 90 * 2**30}, 0)[0]
        freed = 90 - 90 * smaller / micro
        assert advice == (
            f'"train_micro_batch_size_per_gpu": {smaller}, "gradient_accumulation_steps": {steps}: '
            f"frees about {freed:.2f} GiB"
        )
        engine.destroy()


@shared_ranks(1)
def test_phases_are_ranges_in_traces():
    engine = engine_of("nowhere")
    with torch.profiler.profile() as seen:
        step(engine)
    names = {event.key for event in seen.key_averages()}
    assert {"deepspeed: forward", "deepspeed: backward", "deepspeed: step"} <= names
    engine.destroy()
