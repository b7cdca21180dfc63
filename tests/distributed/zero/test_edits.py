"""What scripts write into parameters, in place, through `data` or by other tensors as the data, is trained on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import deepspeed
from deepspeed import log as logs
from deepspeed.errors import UsageError
from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.zero.test_offload_parity import late_updates
from tests.harness import shared_ranks
from tests.models import Tiny, batches, make, share

WHOLE, SHARDED = 10**6, 0
# stage, precision, offload_optimizer, what stays whole: each kind of state on one rank and on two
WAYS = {
    1: [(0, "bf16", False), (1, "fp16", True), (2, "fp32", True), (3, "bf16", False), (3, "bf16", True)],
    2: [
        *((0, "fp16", False), (0, "bf16", True), (1, "fp32", False), (1, "bf16", False)),
        *((2, "fp32", True), (2, "fp16", True), (3, "fp32", False), (3, "bf16", True), (3, "bf16", False, SHARDED)),
    ],
}


class Own(torch.nn.Parameter):
    """A script's own class of parameters."""


class Partly(Tiny):
    """With a layer that is not trained, one that is not used, and a parameter of a class of its own."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.frozen.own = Own(torch.ones(8))
        self.unused = torch.nn.Linear(8, 3)

    def forward(self, tokens, labels):
        return super().forward(tokens, labels) + self.frozen.weight.square().mean() + self.frozen.own.square().mean()


def ways():
    return WAYS[dist.get_world_size()]


def build(stage, precision, offload, persistent=WHOLE):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["loss_scale"] = 128.0
    zero = {"stage": stage, "stage3_param_persistence_threshold": persistent}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **section,
    }
    return deepspeed.initialize(model=make(Partly), config=config)[0]


def backward(engine):
    loss = engine(*share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size()))
    engine.backward(loss)
    return loss.item()


def step(engine):
    loss = backward(engine)
    engine.step()
    return loss


def values(engine):
    """Every parameter as the module has it, and its master."""
    params = list(engine.module.parameters())
    masters = [safe_get_full_fp32_param(param) for param in params]
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params], masters


def assert_same(one, other, what):
    for mine, theirs in zip(values(one), values(other), strict=True):
        for here, there in zip(mine, theirs, strict=True):
            if here is not None or there is not None:
                torch.testing.assert_close(here, there, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


# ---- the same values in other memory


def convert(module):
    dtype = next(module.parameters()).dtype
    module.to(torch.float64)
    module.to(dtype)


def clone(module):
    for param in module.parameters():
        param.data = param.data.clone()


def from_vector(module):
    vector_to_parameters(parameters_to_vector(module.parameters()).detach(), module.parameters())


def clamp(module):
    """In place, without an effect: masters keep their precision."""
    for param in module.parameters():
        param.data.clamp_(-100, 100)


@shared_ranks(1, 2)
def test_training_goes_on_in_other_memory():
    """As without it, to the last bit of the masters; also while updates of the host are on their way."""
    for way in ways():
        with late_updates():
            moved, still = build(*way), build(*way)
        for event in (convert, clone, from_vector, clamp):
            event(moved.module)
            assert backward(moved) == backward(still), (way, event)
            event(moved.module)  # with gradients that wait for the step
            moved.step()
            still.step()
        assert step(moved) == step(still), way
        assert_same(moved, still, way)
        moved.destroy()
        still.destroy()


# ---- other values


def in_place(module):
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)


def through_data(module):
    for param in module.parameters():
        param.data.mul_(0.5)


def through_parts_of_data(module):
    for param in module.parameters():
        for row in param.data:
            row.mul_(0.5)


def other_data(module):
    for param in module.parameters():
        param.data = param.data * 0.5


def other_vector(module):
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() * 0.5, module.parameters())


@shared_ranks(1, 2)
def test_values_are_adopted_however_they_are_written():
    for way in ways():
        one, other = build(*way), build(*way)
        held = [param.data for param in one.module.parameters()]
        step(one), step(other)
        for each in held:  # that was given away before the step
            each.mul_(0.5)
        in_place(other.module)
        assert step(one) == step(other), way
        for event in (through_data, through_parts_of_data, other_data, other_vector):
            event(one.module)
            in_place(other.module)
            assert step(one) == step(other), (way, event)
        assert_same(one, other, way)
        one.destroy()
        other.destroy()


@shared_ranks(1, 2)
def test_the_modifier_decides_at_every_stage():
    last = dist.get_world_size() - 1
    for way in ways():
        one, other = build(*way), build(*way)
        for modifier, event in ((0, through_data), (last, in_place), (0, other_data)):
            with deepspeed.zero.GatheredParameters(one.module.parameters(), modifier_rank=modifier):
                event(one.module)
                if dist.get_rank() != modifier:
                    event(one.module)  # which counts for nothing
            for rank in range(dist.get_world_size()):  # the same on every rank, however edits come to the others
                with deepspeed.zero.GatheredParameters(other.module.parameters(), modifier_rank=rank):
                    if rank == 0:
                        in_place(other.module)
            assert_same(one, other, (way, event))
            assert step(one) == step(other), (way, event)
            assert_same(one, other, (way, event))
        outside = deepspeed.zero.GatheredParameters(one.module.parameters(), modifier_rank=last + 1)
        refused = pytest.raises(UsageError, match=f"modifier_rank is {last + 1}, but .* lies on {last + 1} ranks")
        with refused, outside:
            pass
        one.destroy()
        other.destroy()


@shared_ranks(2)
def test_whole_values_for_a_sharded_parameter():
    """While it is empty: every rank keeps its part."""
    engine = build(3, "bf16", False, SHARDED)
    weight = engine.module.up.weight
    weight.data = torch.full((24, 8), 0.25)
    assert weight.numel() == 0
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full((24, 8), 0.25))
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full((24, 8), 0.25, dtype=torch.bfloat16))
    engine.destroy()


# ---- what cannot be followed


@shared_ranks(2)
def test_a_module_that_stays_converted():
    told = []
    logs.logger.warning = told.append
    for way in ((1, "fp32", False), (2, "fp16", True), (3, "bf16", False)):
        logs.warn_once.cache_clear()
        del told[:]
        engine = build(*way)
        dtype = engine.module.up.weight.dtype
        engine.module.to(torch.float64)
        first = step(engine)
        assert {param.dtype for param in engine.module.parameters() if param.requires_grad} == {dtype}
        assert "torch.float64" in told[0]
        assert f"trains it as {dtype}" in told[0]
        engine.module.to(dtype)
        step(engine)
        assert step(engine) < first
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@shared_ranks(2)
def test_data_of_another_shape(stage):
    engine = build(stage, "fp32", False)
    backward(engine)
    engine.module.up.weight.data = torch.zeros(3, 3)
    with pytest.raises(UsageError, match=r"up.weight came back with the shape \(3, 3\) instead of \(24, 8\)"):
        engine.step()


@shared_ranks(1, 2)
def test_a_parameter_that_was_replaced():
    for stage in (0, 2, 3):
        engine = build(stage, "bf16", False)
        step(engine)
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.module.load_state_dict(state)
        step(engine)
        engine.module.load_state_dict(state, assign=True)
        with pytest.raises(UsageError, match=r"embedding.weight is not the parameter .* assign=True"):
            engine.step()
        engine.destroy()
