"""The compiled update rules against torch's: every format, cuts, threads, forks."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.ops import blockwise
from deepspeed.ops.adagrad import AdagradRule
from deepspeed.ops.adam import AdamRule
from deepspeed.ops.batch_rule import takes
from deepspeed.ops.lion import LionRule
from deepspeed.ops.optimizer import ParameterBatch
from deepspeed.ops.registry import operations

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
RULES = {
    "cpu_adam": [
        AdamRule(lr=1e-2, weight_decay=0.1),
        AdamRule(lr=1e-2, weight_decay=0.1, decoupled=False),
        AdamRule(lr=3e-3, beta1=0.0, beta2=0.5, eps=1e-4, bias_correction=False),
        AdamRule(lr=0.0),
    ],
    "cpu_lion": [LionRule(lr=1e-2, weight_decay=0.1), LionRule(lr=1e-2, beta1=0.3, beta2=0.2)],
    "cpu_adagrad": [AdagradRule(lr=1e-2), AdagradRule(lr=1e-2, eps=1e-4, weight_decay=0.1)],
}
SIGNED = {"cpu_adam": (True, False), "cpu_lion": (True,), "cpu_adagrad": (False,)}
CASES = [(name, rule) for name, rules in RULES.items() for rule in rules]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (1000,), (1025,), (70000,)]
# what a parameter, which is of order 1, may differ by: of float32 a few units in the last place
TOLERANCE = {F32: 4e-7, BF16: 8e-3, F16: 1e-3}


def implementation(op, name):
    found = operations()[op].demand(name)
    return found.load()


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(op, param, grad, moment, out, *, shapes=SHAPES, factor=0.5, step=3):
    """Random tensors; moments are those of a second step."""
    count = len(shapes)
    made = ParameterBatch(step, tuple([] for _ in SIGNED[op]), factor=factor)
    made.params = [normal(shape, i).to(param) for i, shape in enumerate(shapes)]
    made.grads = [normal(shape, count + i).to(grad) for i, shape in enumerate(shapes)]
    made.outs = [torch.empty(shape, dtype=out) for shape in shapes] if out else []
    made.scales = tuple([] for _ in SIGNED[op]) if moment == U8 else ()
    for place, signed in enumerate(SIGNED[op]):
        for i, shape in enumerate(shapes):
            value = normal(shape, (2 + place) * count + i)
            value = value if signed else value.square()
            if moment == U8:
                codes, scales = torch.zeros(value.numel(), dtype=U8), torch.zeros(blockwise.blocks(value.numel()))
                blockwise.encode(value, codes, scales, signed=signed)
                made.moments[place].append(codes)
                made.scales[place].append(scales)
            else:
                made.moments[place].append(value.to(moment))
    return made


def values(made, op):
    """The moments as numbers."""
    if not made.scales:
        return [tensor.float() for tensors in made.moments for tensor in tensors]
    return [
        blockwise.decode(codes, scales, signed=signed)
        for tensors, kept, signed in zip(made.moments, made.scales, SIGNED[op], strict=True)
        for codes, scales in zip(tensors, kept, strict=True)
    ]


def both(op, rule, made):
    """The same batch updated by the kernel and by the reference."""
    other = copy.deepcopy(made)
    assert takes(made)
    implementation(op, "native")(made, rule)
    implementation(op, "reference")(other, rule)
    return made, other


FORMATS = [
    *itertools.product([F32], [F32, BF16, F16], [F32, BF16, F16, U8], [None, F32, BF16, F16]),
    *itertools.product([BF16, F16], [BF16, F16], [F32, BF16, U8], [None, BF16, F32]),
]


@pytest.mark.parametrize(("op", "rule"), CASES, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("formats", FORMATS, ids=lambda each: "-".join(str(x).removeprefix("torch.") for x in each))
def test_kernels_do_as_the_reference(op, rule, formats):
    if op != "cpu_adam" and formats[1] == F16:
        formats = (formats[0], BF16, *formats[2:])  # conversions are the same code for every rule
    shapes = [(), (7,), (0,), (3, 5), (1300,)]
    mine, theirs = both(op, rule, batch(op, *formats, shapes=shapes))
    bound = TOLERANCE[formats[0]]
    for one, other in zip(mine.params, theirs.params, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    for one, param in zip(mine.outs, mine.params, strict=False):
        assert torch.equal(one, param.to(one.dtype))
    for one, other in zip(values(mine, op), values(theirs, op), strict=True):
        if formats[2] == U8:  # where results differ in a last bit, a random rounding may fall the other way
            assert bool(((one - other).abs() <= other.abs() * 0.126 + 1e-30).all())
            assert (one != other).float().mean() < 0.002 or one.numel() < 600
        else:
            torch.testing.assert_close(one, other, rtol=1.6e-2 if formats[2] != F32 else 1e-6, atol=1e-7)


@given(st.lists(st.integers(-2047, 2047), min_size=1, max_size=700), st.integers(1, 10**9), st.booleans())
def test_codes_are_those_of_the_reference(grads, step, signed):
    """Numbers so short that all arithmetic is exact: then every code is the same."""
    op = "cpu_lion" if signed else "cpu_adagrad"
    rule = LionRule(lr=0.5, beta2=0.5) if signed else AdagradRule(lr=0.5)
    made = batch(op, F32, F32, U8, None, shapes=[(len(grads),)], step=step)
    made.grads = [torch.tensor(grads, dtype=F32)]
    for tensors in (*made.moments, *made.scales):
        tensors[0].zero_()
    mine, theirs = both(op, rule, made)
    assert torch.equal(mine.moments[0][0], theirs.moments[0][0])
    assert torch.equal(mine.scales[0][0], theirs.scales[0][0])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_number_is_rounded_as_torch_rounds_it(dtype):
    every = torch.arange(2**16, dtype=torch.int32)
    exact = (every << 16).view(F32) if dtype == BF16 else every.to(torch.int16).view(F16).float()
    exact = exact[~exact.isnan()]
    bits = exact.view(torch.int32)
    odd = 1 << (15 if dtype == BF16 else 12)  # ties, and their neighbours
    cases = torch.cat(
        [(bits + shift).view(F32) for shift in (0, odd - 1, odd, odd + 1)] + [torch.tensor([65519.9, 7e4])]
    )
    cases = torch.cat([cases[~cases.isnan()], 10 ** torch.linspace(-12, 6, 997), torch.tensor([float("nan")])])
    made = batch("cpu_lion", F32, F32, F32, dtype, shapes=[tuple(cases.shape)], factor=1.0)
    made.params, made.grads = [cases.clone()], [torch.zeros_like(cases)]
    implementation("cpu_lion", "native")(made, LionRule(lr=0.0))
    assert torch.equal(made.outs[0].view(torch.int16)[:-1], cases.to(dtype).view(torch.int16)[:-1])
    assert made.outs[0][-1].isnan()
    back = batch("cpu_lion", F32, dtype, F32, None, shapes=[tuple(cases.shape)], factor=1.0)
    back.grads, back.moments = [cases.to(dtype)], ([torch.zeros_like(cases)],)
    implementation("cpu_lion", "native")(back, LionRule(lr=0.0, beta2=0.0))
    finite = back.grads[0].isfinite()
    assert torch.equal(back.moments[0][0][finite], back.grads[0].float()[finite])


@pytest.mark.parametrize(("op", "rule"), CASES, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("moment", [F32, BF16, U8])
def test_neither_threads_nor_cuts_show_in_a_bit(op, rule, moment):
    kernel, before = implementation(op, "native"), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made = batch(op, F32, BF16, moment, BF16)
            kernel(made, rule)
            results.append([*made.params, *made.outs, *itertools.chain(*made.moments), *itertools.chain(*made.scales)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    if moment != U8:  # blocks begin where tensors do
        whole = batch(op, F32, BF16, moment, BF16, shapes=[(5000,)])
        parts = copy.deepcopy(whole)
        for name in ("params", "grads", "outs"):
            setattr(parts, name, list(getattr(parts, name)[0].split([1, 1023, 2100, 1876])))
        parts.moments = tuple(list(tensors[0].split([1, 1023, 2100, 1876])) for tensors in parts.moments)
        kernel(whole, rule)
        kernel(parts, rule)
        assert torch.equal(torch.cat(parts.params), whole.params[0])
        assert torch.equal(torch.cat(parts.moments[0]), whole.moments[0][0])


def test_what_kernels_do_not_take_goes_to_torch():
    rule = AdamRule(lr=1e-2)
    for change in (lambda t: t.double(), lambda t: torch.stack([t, t], -1)[..., 0]):
        made = batch("cpu_adam", F32, F32, F32, None, shapes=[(9,)])
        made.params = [change(made.params[0])]
        assert not takes(made)
        other = copy.deepcopy(made)
        implementation("cpu_adam", "native")(made, rule)
        implementation("cpu_adam", "reference")(other, rule)
        torch.testing.assert_close(made.params, other.params, rtol=1e-6, atol=1e-7)


def test_an_infinite_gradient_shows():
    for bad in (float("inf"), float("nan")):
        made = batch("cpu_adam", F32, F32, U8, None, shapes=[(300,)])
        made.grads[0][5] = bad
        mine, theirs = both("cpu_adam", AdamRule(lr=1e-2), made)
        assert not mine.params[0][5].isfinite()
        assert not values(mine, "cpu_adam")[1][5].isfinite()
        assert torch.equal(mine.params[0].isfinite(), theirs.params[0].isfinite())


def test_a_child_of_a_fork_has_threads_of_its_own():
    kernel, rule = implementation("cpu_adam", "native"), AdamRule(lr=1e-2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kernel(batch("cpu_adam", F32, F32, F32, None), rule)  # the parent's threads are there
        made, other = (batch("cpu_adam", F32, F32, F32, None) for _ in range(2))
        for tensor in made.params:
            tensor.share_memory_()
        child = os.fork()
        if child == 0:
            try:
                kernel(made, rule)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        kernel(other, rule)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(made.params, other.params, strict=True))
