"""Sums before norms, computed by the norm: which code is written again, and that it computes the same."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.fusion import norms
from deepspeed.fusion.build import find, put
from deepspeed.transformers.replacement import Refused, Swap


class Layer(nn.Module):
    def __init__(self, norm=nn.RMSNorm):
        super().__init__()
        self.norm, self.first, self.second, self.drop = norm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.0)


class Usual(Layer):
    def forward(self, x, scale=1.0, *, shift=0.5):
        residual = x
        x = torch.tanh(self.first(x)) * scale + shift
        x = residual + x
        residual = x
        x = self.norm(x)
        return residual + self.second(x)


class Dropped(Layer):
    """The sum the other way round, of something computed on the way."""

    def forward(self, x):
        y = self.first(x)
        y = self.drop(y) + x
        kept = y
        y = self.norm(y)
        return kept * self.second(y)


class Inside(Layer):
    """In a branch."""

    def forward(self, x):
        if x.sum() > -1e9:
            y = self.first(x)
            y = x + y
            x = y
            y = self.norm(y)
        return x + self.second(y)


class First(Layer):
    """What is normalised is kept, and was no sum."""

    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept + self.second(torch.tanh(self.first(x)))


class Twice(Layer):
    """Both, of one norm."""

    def forward(self, x):
        residual = x
        x = self.norm(x)
        x = self.first(x)
        x = residual + x
        residual = x
        x = self.norm(x)
        return residual + self.second(x)


class Grown(Layer):
    """What is kept is changed in place."""

    def forward(self, x):
        kept = x
        x = self.norm(x)
        kept += self.second(x)
        return kept


class Added(Layer):
    """The same by a method."""

    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept.add_(self.second(x))


class Written(Layer):
    """The same by an index."""

    def forward(self, x):
        kept = x
        x = self.norm(x)
        kept[..., 0] = 0
        return kept + self.second(x)


class Walrus(Layer):
    """One part of the sum assigns the other."""

    def forward(self, x):
        y = self.first(x)
        y = y + (y := self.second(x))
        x = y
        y = self.norm(y)
        return x + y


class Numbers(Layer):
    """What is added are numbers, and rows."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__(norm)
        self.shift, self.row = 0.5, nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = self.shift + x
        kept = x
        x = self.norm(x)
        x = self.first(x)
        x = x + self.row
        again = x
        x = self.norm(x)
        return kept + again + self.second(x)


class Default(Layer):
    """A default that is code, too, and text of several lines."""

    def forward(self, x, act=lambda y: y * 2):
        text = """one
            two"""
        kept = x
        x = self.norm(x)
        return kept * (len(text) == 19) + act(self.first(self.second(x)))


class Private(Layer):
    """Names that belong to the class."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__(norm)
        self.__scale = 2.0

    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept + self.__scale * self.second(x)


CALLS = []


def named(function):
    @wraps(function)
    def outer(self, *args, **kwargs):
        CALLS.append("named")
        return function(self, *args, **kwargs)

    return outer


def unnamed(function):
    def outer(self, *args, **kwargs):
        CALLS.append("unnamed")
        return function(self, *args, **kwargs)

    return outer


def in_a_partial(function):
    call = partial(function)

    def outer(self, *args, **kwargs):
        CALLS.append("partial")
        return call(self, *args, **kwargs)

    outer.__wrapped__ = call
    return outer


class Decorated(Usual):
    @named
    @unnamed
    @in_a_partial
    def forward(self, x):
        y = self.first(x)
        y = x + y
        x = y
        y = self.norm(y)
        return x + self.second(y)


class Checkpointing(Layer):
    """Wraps the forward of each class made of it, and knows by itself whether it is the outermost."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @wraps(forward)
        def outer(self, *args, **kwargs):
            if type(self).forward is not outer:
                return forward(self, *args, **kwargs)
            CALLS.append("checkpoint")
            return checkpoint(partial(forward, self, **kwargs), *args, use_reentrant=False)

        cls.forward = outer


class Checkpointed(Checkpointing):
    def forward(self, x):
        CALLS.append("forward")
        y = self.first(x)
        y = x + y
        x = y
        y = self.norm(y)
        return x + self.second(y)


class CheckpointedAgain(Checkpointed):
    """Wrapped twice."""


HIDDEN = []


def without_closure(function):
    HIDDEN.append(function)

    @wraps(function)
    def outer(self, x):
        return 2 * HIDDEN[0](self, x)

    return outer


class Hidden(Layer):
    """A decorator without a trace of what it calls."""

    @without_closure
    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept + self.second(x)


class Other(Layer):
    """Both names are read."""

    def forward(self, x):
        kept = x
        y = self.norm(x)
        return kept + self.second(y) + x


class Later(Layer):
    """The sum is not kept."""

    def forward(self, x):
        y = x + self.first(x)
        y = self.norm(y)
        return x + self.second(y)


class Apart(Layer):
    """Something lies between."""

    def forward(self, x):
        y = self.first(x)
        y = x + y
        x = y
        y = y * 2
        y = self.norm(y)
        return x + self.second(y)


class Minus(Layer):
    """A difference is kept, and no sum."""

    def forward(self, x):
        y = self.first(x)
        y = x - y
        x = y
        y = self.norm(y)
        return x + self.second(y)


class Named(Layer):
    """The sum is read again under its own name."""

    def forward(self, x):
        y = self.first(x)
        y = x + y
        x = y
        z = self.norm(y)
        return x + self.second(z) + y


def sums(model):
    return [each for each in find(model, ("norm",)) if each.kind == "sum"]


def outcome(model, x):
    loss = model(x).square().mean()
    return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(
    ("kind", "asked"),
    [(Usual, [{"residual"}]), (Dropped, [{"residual"}]), (Inside, [{"residual"}]), (First, [{"keeps"}]),
     (Minus, [{"keeps"}]), (Twice, [{"keeps"}, {"residual"}]), (Numbers, [{"residual"}, {"residual"}]),
     (Default, [{"keeps"}]), (Walrus, [{"keeps"}])],
)  # fmt: skip
def test_the_same_values_and_gradients(kind, asked, norm):
    torch.manual_seed(0)
    model = nn.Sequential(kind(norm), kind(norm))
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8, requires_grad=True)
    findings = list(find(model, ("norm",)))
    assert [type(each.result) for each in findings if each.kind == "sum"] == [Swap, Swap]
    with ExitStack() as undo:
        put(findings, undo)
        seen = []
        inner = model[0].norm.forward

        @wraps(inner)  # which makes it look as if nobody had wrapped it
        def spy(*args, **kwargs):
            seen.append(set(kwargs))
            return inner(*args, **kwargs)

        model[0].norm.forward = spy
        for one, other in zip(outcome(model, x), outcome(plain, x), strict=True):
            torch.testing.assert_close(one, other)
        assert seen == asked, "the norm adds"
        model[0].norm.forward = inner
    assert not any("forward" in module.__dict__ for module in model.modules()), "everything is put back"


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (Decorated, ["named", "unnamed", "partial"]),
        (Checkpointed, ["checkpoint", "forward", "forward"]),  # the second in the backward
        (CheckpointedAgain, ["checkpoint", "forward", "forward"]),
    ],
)
def test_decorators_do_what_they_did_around_a_norm_that_adds(kind, calls):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 8, requires_grad=True)
    expected, seen = outcome(model, x), []
    with ExitStack() as undo:
        put(list(find(model, ("norm",))), undo)
        inner = model.norm.forward
        model.norm.forward = wraps(inner)(lambda *args, **kwargs: seen.append(set(kwargs)) or inner(*args, **kwargs))
        CALLS.clear()
        torch.testing.assert_close(outcome(model, x), expected)
        assert calls == CALLS
        assert seen == [{"residual"}] * max(1, calls.count("forward"))
        model.norm.forward = inner


@pytest.mark.parametrize("kind", [Later, Apart, Named, Grown, Added, Written, Other])
def test_other_code_stays_as_it_is(kind):
    assert sums(kind()) == []


class Lines(Usual):
    def forward(self, x):
        y = self.first(x)
        y = x + y
        x = y
        y = self.norm(y)
        y = x + self.second(y)
        return y  # noqa: RET504  # a line of its own is what is tried


@pytest.mark.parametrize(("kind", "calls"), [(Usual, 1), (Lines, 1), (Minus, 1), (Default, 0), (Inside, 1), (Twice, 1)])
def test_what_a_layer_returns_is_a_sum_by_one_function(monkeypatch, kind, calls):
    seen = []
    monkeypatch.setattr(norms, "residual_sum", lambda one, other: seen.append(one) or one + other)
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 8)
    expected = model(x)
    with ExitStack() as undo:
        put(list(find(model, ("norm",))), undo)
        torch.testing.assert_close(model(x), expected)
    assert len(seen) == calls
    assert not any("_residual_sum" in vars(module) for module in model.modules()), "everything is put back"


def test_arguments_and_defaults_are_those_of_the_class():
    torch.manual_seed(0)
    model, x = Usual(), torch.randn(3, 8)
    expected = model(x, 2.0, shift=0.25), model(x)
    put(list(find(model, ("norm",))), ExitStack())
    torch.testing.assert_close(model(x, scale=2.0, shift=0.25), expected[0])
    torch.testing.assert_close(model(x), expected[1])


def test_a_hook_of_somebody_sees_what_it_saw():
    torch.manual_seed(0)
    model, x = Usual(), torch.randn(3, 8)
    plain, seen = copy.deepcopy(model), []
    put(list(find(model, ("norm",))), ExitStack())
    for each in (model, plain):
        each.norm.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
        each(x)
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)


def wrap(model):
    inner = model.norm.forward
    model.norm.forward = lambda x: inner(x) * 2


def pass_by(model):
    model.norm = nn.Identity()


@pytest.mark.parametrize("change", [wrap, pass_by, lambda model: model.norm.compile(backend="eager")])
def test_a_norm_that_changed_meanwhile_only_normalises(change):
    torch.manual_seed(0)
    model, x = Usual(), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    put(list(find(model, ("norm",))), ExitStack())
    for each in (model, plain):
        change(each)
    torch.testing.assert_close(model(x), plain(x))


def test_hooks_of_the_backward_and_of_all_modules_see_what_they_saw():
    torch.manual_seed(0)
    model, x = Usual(), torch.randn(3, 8)
    plain, seen = copy.deepcopy(model), []
    put(list(find(model, ("norm",))), ExitStack())
    for each in (model, plain):
        hook = each.norm.register_full_backward_hook(lambda module, into, out: seen.append((*into, *out)))
        each(x).sum().backward()
        hook.remove()
    torch.testing.assert_close(*seen)
    seen.clear()
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(out)):
        model(x)
        plain(x)
    torch.testing.assert_close(seen[: len(seen) // 2], seen[len(seen) // 2 :])


def test_a_layer_that_somebody_wrapped_is_told():
    model = Usual()
    model.forward = lambda x: x
    for each in (model, Private(), Hidden()):
        (found,) = sums(each)
        assert isinstance(found.result, Refused)


def test_numbers_of_different_kinds_are_added_as_ever():
    """A residual in float32 beside a layer in bfloat16, as some models keep it."""
    torch.manual_seed(0)

    class Wide(Layer):
        def forward(self, x):
            y = self.first(x.bfloat16())
            y = x + y
            x = y
            y = self.norm(y)
            return x + y

    model = Wide()
    model.first.bfloat16()
    x = torch.randn(3, 8)
    expected = model(x)
    put(list(find(model, ("norm",))), ExitStack())
    torch.testing.assert_close(model(x), expected)


def test_a_compiler_sees_the_class():
    torch.manual_seed(0)
    model, x = Usual(), torch.randn(3, 8)
    expected = model(x)
    put(list(find(model, ("norm",))), ExitStack())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
