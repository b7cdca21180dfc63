"""The kernels of the optimizers for devices beside their references."""

import copy
from functools import partial

import pytest
import torch

from deepspeed.ops import blockwise
from deepspeed.ops.adam import ONE_PASS as ADAM
from deepspeed.ops.adam import AdamRule
from deepspeed.ops.lamb import ONE_PASS as LAMB
from deepspeed.ops.lamb import LambRule
from deepspeed.ops.lion import ONE_PASS as LION
from deepspeed.ops.lion import LionRule
from deepspeed.ops.muon import momentum
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import ParameterBatch

from .interpreted import DEVICE, close, numbers

SIZES = [(3, 5), (130,), (1,), (70, 130)]  # the last one is more than one program updates
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
UPDATES = {
    "adam": (ADAM, partial(AdamRule, 1e-2, weight_decay=0.1, eps=1e-6)),
    "adam with l2": (ADAM, partial(AdamRule, 1e-2, weight_decay=0.1, eps=1e-6, decoupled=False)),
    "lion": (LION, partial(LionRule, 1e-2, weight_decay=0.1)),
    "lamb": (LAMB, partial(LambRule, 1e-2, weight_decay=0.1, eps=1e-6, max_coeff=3.0)),
    "lamb, eps inside": (LAMB, partial(LambRule, 1e-2, eps=1e-3, eps_inside_sqrt=True, scale=2.0)),
}


def batch(update, param, grad, moment, out, *, factor=1.0):
    made = [[numbers(*size, dtype=dtype, seed=seed) for size in SIZES] for seed, dtype in enumerate((param, grad))]
    moments = tuple(
        [numbers(*size, dtype=moment, seed=seed).abs() for size in SIZES]
        for seed, _ in enumerate(update.rule.signed, 5)
    )
    outs = [] if out is None else [torch.full(size, 7.0, dtype=out, device=DEVICE) for size in SIZES]
    return ParameterBatch(3, moments, made[0], made[1], factor=factor, outs=outs)


def coded(of, signed):
    """The same batch with moments in 8 bits."""
    scales = []
    for tensors, sign in zip(of.moments, signed, strict=True):
        scales.append([torch.zeros(blockwise.blocks(each.numel()), device=DEVICE) for each in tensors])
        for place, each in enumerate(tensors):
            codes = torch.zeros(each.numel(), dtype=torch.uint8, device=DEVICE)
            blockwise.encode(each, codes, scales[-1][place], signed=sign)
            tensors[place] = codes
    of.scales = tuple(scales)
    return of


def conditions(divisor, skip):
    return Conditions(torch.tensor(divisor, device=DEVICE), torch.tensor(skip, device=DEVICE))


def lists(of):
    return [*of.params, *(each for tensors in of.moments for each in tensors), *of.outs]


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("grad", "moment", "out"), [(F32, F32, None), (BF16, F32, BF16), (F16, BF16, BF16)])
def test_the_kernel_updates_as_the_reference_does(name, grad, moment, out):
    update, make = UPDATES[name]
    mine = batch(update, F32, grad, moment, out, factor=0.5)
    theirs = copy.deepcopy(mine)
    found = update.triton(mine, make(), conditions(4.0, 0.0))
    expected = update.reference(theirs, make(), conditions(4.0, 0.0))
    close(mine.params, theirs.params, F32 if moment == F32 else BF16)
    close(lists(mine), lists(theirs), BF16)
    ratios = [[each for result in results for each in result or ()] for results in (found, expected)]
    close(*ratios, F32)
    assert len(ratios[0]) == (len(SIZES) if update is LAMB else 0)
    if out is not None and DEVICE != "cpu":  # the interpreter cuts bits off where devices round
        assert all(torch.equal(a, b.to(out)) for a, b in zip(mine.outs, mine.params, strict=True))


@pytest.mark.parametrize("name", ["adam", "lion", "lamb", "lamb, eps inside"])
def test_moments_in_eight_bits(name):
    update, make = UPDATES[name]
    mine = coded(batch(update, F32, BF16, F32, BF16), update.rule.signed)
    theirs = copy.deepcopy(mine)
    for step in (1, 2, 17):
        mine.step = theirs.step = step
        found = update.triton(mine, make(), conditions(4.0, 0.0))
        expected = update.reference(theirs, make(), conditions(4.0, 0.0))
        if update is LAMB:
            close(*([each for result in results for each in result] for results in (found, expected)), BF16)
        same = total = 0
        for place, sign in enumerate(update.rule.signed):
            for each, _ in enumerate(SIZES):
                codes, scales = mine.moments[place][each], mine.scales[place][each]
                others = theirs.moments[place][each]
                assert torch.equal(scales, theirs.scales[place][each])
                same, total = same + int((codes == others).sum()), total + codes.numel()
                a, b = (blockwise.decode(c, scales, signed=sign) for c in (codes, others))
                torch.testing.assert_close(a, b, rtol=0.13, atol=1e-6)  # never more than the next code
        assert same > 0.99 * total, "rounded by other random numbers than the reference"
        close(mine.params, theirs.params, BF16)


def test_a_second_moment_never_becomes_zero_and_bad_numbers_stay():
    mine = coded(batch(ADAM, F32, F32, F32, None), ADAM.rule.signed)
    mine.grads[1].fill_(1e-12)
    mine.grads[1][7] = float("nan")
    theirs = copy.deepcopy(mine)
    ADAM.triton(mine, AdamRule(1e-2))
    ADAM.reference(theirs, AdamRule(1e-2))
    for place in (0, 1):
        assert torch.equal(mine.moments[place][1].cpu(), theirs.moments[place][1].cpu())
        assert torch.equal(mine.scales[place][1], theirs.scales[place][1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", UPDATES)
def test_a_gradient_that_is_not_finite_does_what_it_does_to_the_reference(name, bad):
    update, make = UPDATES[name]
    mine = batch(update, F32, F32, F32, BF16)
    mine.grads[3][40, 7] = bad
    theirs = copy.deepcopy(mine)
    update.triton(mine, make())
    update.reference(theirs, make())
    for found, expected in zip(lists(mine), lists(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-4, equal_nan=True)
    lost = theirs.params[3].isnan().sum()
    assert lost == {"adam": 1, "lion": 0, "lamb": 70 * 130}[update.rule.name]


@pytest.mark.parametrize("name", ["adam", "lion", "lamb"])
def test_nothing_changes_where_the_conditions_say_skip(name):
    update, make = UPDATES[name]
    mine = batch(update, F32, BF16, F32, BF16)
    before = copy.deepcopy(mine)
    update.triton(mine, make(), conditions(1.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(lists(mine), lists(before), strict=True))


def test_a_scale_that_is_a_tensor():
    mine = batch(LAMB, F32, F32, F32, None)
    theirs = copy.deepcopy(mine)
    rule = LambRule(1e-2, scale=torch.tensor(3.0, device=DEVICE))
    LAMB.triton(mine, rule)
    LAMB.reference(theirs, rule)
    close(lists(mine), lists(theirs), F32)


@pytest.mark.parametrize("name", ["adam", "lion", "lamb"])
def test_without_conditions_and_with_memory_that_is_not_dense(name):
    update, make = UPDATES[name]
    mine = batch(update, F32, F32, F32, BF16)
    mine.params[0] = numbers(5, 3).t()
    theirs = copy.deepcopy(mine)
    update.triton(mine, make())
    update.reference(theirs, make())
    close(lists(mine), lists(theirs), BF16)


def test_autograd_notices_the_update():
    made = batch(ADAM, F32, BF16, F32, BF16)
    before = [tensor._version for tensor in (*made.params, *made.outs)]
    ADAM.triton(made, AdamRule(1e-2))
    assert all(tensor._version > old for tensor, old in zip((*made.params, *made.outs), before, strict=True))


def momenta(grad, moment, out):
    made = [
        [numbers(*size, dtype=dtype, seed=seed) for size in SIZES] for seed, dtype in enumerate((F32, grad, moment))
    ]
    outs = [None if place == 1 or out is None else torch.zeros(size, dtype=out) for place, size in enumerate(SIZES)]
    return momentum.Momenta(*made, [None if each is None else each.to(DEVICE) for each in outs], factor=0.5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("grad", "moment", "out"), [(F32, F32, None), (BF16, F32, BF16), (F16, BF16, BF16)])
def test_the_momentum_of_muon(nesterov, grad, moment, out):
    mine, rule = momenta(grad, moment, out), momentum.MomentumRule(0.9, nesterov, lr=0.1, keep=0.99)
    mine.conditions = conditions(4.0, 0.0)
    theirs = copy.deepcopy(mine)
    ways = [[torch.full(size, 7.0, device=DEVICE) for size in SIZES] for _ in range(2)]
    momentum.directions_triton(mine, rule, ways[0])
    momentum.directions_reference(theirs, rule, ways[1])
    close(*ways, F32)
    updates = [numbers(*size, seed=9) for size in SIZES]
    updates[1].fill_(float("nan"))  # refused
    momentum.apply_triton(mine, rule, updates)
    momentum.apply_reference(theirs, rule, updates)
    close(mine.params, theirs.params, F32)
    close(mine.momenta, theirs.momenta, F32 if moment == F32 else BF16)
    close([each for each in mine.outs if each is not None], [each for each in theirs.outs if each is not None], BF16)
    before = copy.deepcopy(mine)
    mine.conditions = conditions(4.0, 1.0)
    momentum.apply_triton(mine, rule, updates)
    assert all(torch.equal(a, b) for a, b in zip(mine.params, before.params, strict=True))


def test_the_momentum_of_muon_in_eight_bits():
    mine, rule = momenta(BF16, F32, BF16), momentum.MomentumRule(0.9, lr=0.1, keep=0.99)
    mine.scales = [torch.zeros(blockwise.blocks(each.numel()), device=DEVICE) for each in mine.momenta]
    for place, each in enumerate(mine.momenta):
        codes = torch.zeros(each.numel(), dtype=torch.uint8, device=DEVICE)
        blockwise.encode(each, codes, mine.scales[place], signed=True)
        mine.momenta[place] = codes
    mine.steps = [1, 2, 2, 7]  # parameters that are not all of one age
    theirs = copy.deepcopy(mine)
    ways = [[torch.full(size, 7.0, device=DEVICE) for size in SIZES] for _ in range(2)]
    momentum.directions_triton(mine, rule, ways[0])
    momentum.directions_reference(theirs, rule, ways[1])
    close(*ways, F32)
    updates = [numbers(*size, seed=9) for size in SIZES]
    updates[1].fill_(float("nan"))  # refused: its codes stay
    before = mine.momenta[1].clone()
    momentum.apply_triton(mine, rule, updates)
    momentum.apply_reference(theirs, rule, updates)
    close(mine.params, theirs.params, F32)
    assert torch.equal(mine.momenta[1], before)
    assert torch.equal(theirs.momenta[1], before)
    for codes, others, scales, wanted in zip(mine.momenta, theirs.momenta, mine.scales, theirs.scales, strict=True):
        assert torch.equal(scales, wanted)
        assert (codes == others).float().mean() > 0.99
