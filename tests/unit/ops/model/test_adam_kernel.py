"""Adam's kernel for devices beside its reference."""

import copy

import pytest
import torch

from .interpreted import DEVICE, close, numbers

from deepspeed.ops.adam.one_pass import adam_one_pass_reference_, adam_one_pass_triton_  # isort: skip
from deepspeed.ops.adam.rule import AdamRule, Conditions
from deepspeed.ops.optimizer import Batch

SIZES = [(3, 5), (130,), (1,), (70, 130)]  # the last one is more than one program updates


def batch(param, grad, moment, out, *, factor=1.0):
    made = [[numbers(*size, dtype=dtype, seed=seed) for size in SIZES] for seed, dtype in enumerate((param, grad))]
    moments = [[numbers(*size, dtype=moment, seed=seed).abs() for size in SIZES] for seed in (5, 6)]
    outs = [] if out is None else [torch.full(size, 7.0, dtype=out, device=DEVICE) for size in SIZES]
    return Batch(3, tuple(moments), made[0], made[1], factor=factor, outs=outs)


def conditions(divisor, skip):
    return Conditions(torch.tensor(divisor, device=DEVICE), torch.tensor(skip, device=DEVICE))


def lists(of):
    return [*of.params, *of.moments[0], *of.moments[1], *of.outs]


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_updates_as_the_reference_does(grad, moment, out, decoupled):
    rule = AdamRule(1e-2, weight_decay=0.1, eps=1e-6, decoupled=decoupled)
    mine = batch(torch.float32, grad, moment, out, factor=0.5)
    theirs = copy.deepcopy(mine)
    adam_one_pass_triton_(mine, rule, conditions(4.0, 0.0))
    adam_one_pass_reference_(theirs, rule, conditions(4.0, 0.0))
    close(lists(mine)[: len(SIZES)], lists(theirs)[: len(SIZES)], torch.float32)
    close(lists(mine), lists(theirs), torch.bfloat16)
    if out is not None and DEVICE != "cpu":  # the interpreter cuts bits off where devices round
        assert all(torch.equal(a, b.to(out)) for a, b in zip(mine.outs, mine.params, strict=True))


def test_nothing_changes_where_the_conditions_say_skip():
    mine = batch(torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    before = copy.deepcopy(mine)
    adam_one_pass_triton_(mine, AdamRule(1e-2), conditions(1.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(lists(mine), lists(before), strict=True))


def test_without_conditions_and_with_memory_that_is_not_dense():
    mine = batch(torch.float32, torch.float32, torch.float32, torch.bfloat16)
    mine.params[0] = numbers(5, 3).t()
    theirs = copy.deepcopy(mine)
    adam_one_pass_triton_(mine, AdamRule(1e-2))
    adam_one_pass_reference_(theirs, AdamRule(1e-2))
    close(lists(mine), lists(theirs), torch.bfloat16)


def test_autograd_notices_the_update():
    made = batch(torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    before = [tensor._version for tensor in (*made.params, *made.outs)]
    adam_one_pass_triton_(made, AdamRule(1e-2))
    assert all(tensor._version > old for tensor, old in zip((*made.params, *made.outs), before, strict=True))
