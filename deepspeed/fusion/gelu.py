"""A linear layer with a bias and the GELU behind it: the bias, the activation and their gradients in one pass each.

The layer computes both, since its parameters may be there only while it runs, and the activation hands on what it gets:
while the module runs that calls one after the other, and nobody looks between them. Each computes its own for whoever
else calls it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.equivalence import alike, attempt, only_ours, overridden, stand_in, watched_everywhere
from deepspeed.fusion.feed_forward import is_gated
from deepspeed.fusion.recompute import recomputed_input
from deepspeed.ops.model.gated import ACTIVATIONS, FORMS, bias_gelu
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import (
    TOKENS,
    Refused,
    Swap,
    Undo,
    put_forward,
    put_whole,
    replacement,
    whole_shape,
)

_WIDTH = 8
Product = Callable[[Tensor, Tensor], Tensor]
Names = tuple[str, str]
"""Of the layer and the GELU in their module."""


def find_gelu(module: nn.Module, alone: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Swap | Refused]]:
    """(name of the layer, how it and the GELU behind it are replaced); `alone` tells what a model has in one place."""
    if is_gated(module):
        return
    for name, child in module.named_children():
        if (kind := _form(child)) is None:
            continue
        reason = overridden(module) or overridden(child)
        layer = None if reason else _layer_before(module, name, kind)
        if reason or layer is None:
            if any(_has_parameters(other) for other in module.children()):
                told = reason or f"no layer of {type(module).__name__} could be seen to be read by it alone"
                yield name, Refused(told)
            continue
        yield layer, _swap(module, (layer, name), kind, alone)


def _swap(module: nn.Module, names: Names, kind: str, alone: Callable[[nn.Module], bool]) -> Swap | Refused:
    layer, act = (module.get_submodule(name) for name in names)
    product = _product(layer)
    if product is None:
        return Refused(f"the layer before its GELU is a {type(layer).__name__}, not a plain linear layer")
    if reason := overridden(layer):
        return Refused(reason)
    bias = getattr(layer, "bias", None)
    if bias is None:
        return Refused("the layer before its GELU has no bias")
    if not (alone(layer) and alone(act)):
        return Refused("the layer or its GELU is used in several places")
    if layer._forward_hooks or act._forward_hooks or act._forward_pre_hooks:
        return Refused("a hook looks at what is between the layer and its GELU")
    run = LinearGelu(names, kind, product)

    def put() -> Undo:
        first, second = put_forward(layer, run.run, compiled=run.plain), put_forward(act, run.act)
        third = put_whole(module, partial(run.around, replacement(module) or type(module).forward))

        def undo() -> None:
            third()
            second()
            first()

        return undo

    return Swap(f"bias and {kind}", put, partial(_scene, kind, whole_shape(bias)[0]))


def _scene(kind: str, width: int, *, dtype: torch.dtype) -> None:
    forward_and_backward(lambda x, bias: bias_gelu(x, bias, kind), (TOKENS, width), (width,), dtype=dtype)


class _State(threading.local):
    """Of a thread: whether the layer may compute both, and whether it did and the GELU is still to come."""

    together = False
    done = False


class LinearGelu:
    """What one layer computes: its product, then the bias and the GELU."""

    def __init__(self, names: Names, kind: str, product: Product) -> None:
        self.names, self.kind, self.product = names, kind, product
        self._own, self._state = product, _State()

    def around(self, forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module of both."""
        state = self._state
        before = state.together, state.done
        state.together, state.done = self._unseen(module), False
        try:
            return forward(module, *args, **kwargs)
        finally:
            state.together, state.done = before

    def _unseen(self, module: nn.Module) -> bool:
        """Whether both are where they were found, and nobody looks between them."""
        parts = [module._modules.get(name) for name in self.names]
        return not watched_everywhere() and all(
            part is not None and getattr(replacement(part), "__self__", None) is self and only_ours(part)
            for part in parts
        )

    def run(self, module: Any, input: Tensor) -> Tensor:
        if not self._state.together:
            return self.plain(module, input)
        with recomputed_input(input, module):
            inner = self.product(input, module.weight)
        self._state.done = True
        return bias_gelu(inner, module.bias, self.kind)

    def act(self, module: Any, input: Tensor) -> Tensor:
        if not self._state.done:
            result: Tensor = type(module).forward(module, input)
            return result
        self._state.done = False
        return input

    def plain(self, module: Any, input: Tensor) -> Tensor:
        """The layer without the GELU, as a compiler gets to see it, too."""
        product = None if self.product is self._own else self.product(input, module.weight)
        result: Tensor = (
            type(module).forward(module, input) if product is None else product + module.bias.to(product.dtype)
        )
        return result

    def multiply_by(self, product: Product) -> Undo:
        """Take another product from now on."""
        before, self.product = self.product, product

        def undo() -> None:
            self.product = before

        return undo


def _form(module: nn.Module) -> str | None:
    """The form of GELU that a module is, found by trying."""
    if _has_parameters(module) or any(True for _ in module.children()):
        return None
    x = torch.linspace(-5, 5, 41)
    twin = stand_in(module, {}, {})
    return next((kind for kind in FORMS if alike(lambda: type(module).forward(twin, x), ACTIVATIONS[kind](x))), None)


def _product(layer: nn.Module) -> Product | None:
    """How a linear layer multiplies its input by its weight; None where it is none."""
    if type(layer) is nn.Linear:
        return functional.linear
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    if own != {"weight", "bias"} or any(True for _ in layer.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 3, _WIDTH), (_WIDTH, 5), (5,)))
    twin = stand_in(layer, {"weight": weight, "bias": bias}, {})
    twin.__dict__["nf"] = 5  # Conv1D of Transformers reads its width
    return torch.matmul if alike(lambda: type(layer).forward(twin, x), x @ weight + bias) else None


def _layer_before(module: nn.Module, act: str, kind: str) -> str | None:
    """The child whose result the activation reads, all of it, and nobody else does: found by trying each."""
    if type(module).forward is nn.Sequential.forward:
        names = list(module._modules)
        before = names[names.index(act) - 1] if names.index(act) else None
        return before if before is not None and _has_parameters(module.get_submodule(before)) else None
    stubs = {name: _stub(child) for name, child in module.named_children()}
    x = torch.randn(2, 3, _WIDTH, generator=torch.Generator().manual_seed(0))
    expected = attempt(lambda: type(module).forward(_in_training(stand_in(module, {}, stubs)), x))
    if not isinstance(expected, Tensor):
        return None
    for name, child in module.named_children():
        if _has_parameters(child):
            layer, through = _Counted(stubs[name], ACTIVATIONS[kind]), _Counted(None, None)
            twin = _in_training(stand_in(module, {}, {**stubs, name: layer, act: through}))
            same = alike(lambda twin=twin: type(module).forward(twin, x), expected)  # type: ignore[misc]
            if same and (layer.calls, through.calls) == (1, 1):
                return name
    return None


def _stub(child: nn.Module) -> nn.Module:
    """Something small that stands for a child: a square layer where it has parameters, else itself in training."""
    if _has_parameters(child):
        made = nn.Linear(_WIDTH, _WIDTH, device="cpu", dtype=torch.float32)
        numbers = torch.Generator().manual_seed(1)
        made.weight.data, made.bias.data = (torch.randn(p.shape, generator=numbers) for p in made.parameters())
        return made
    return _in_training(copy.copy(child))


def _in_training(twin: nn.Module) -> nn.Module:
    """With dropout, of which each trial draws the same: what it leaves out tells where it is."""
    twin.training = True
    return twin


class _Counted(nn.Module):
    """`layer` and then `act`, or what it gets where there are none."""

    def __init__(self, layer: nn.Module | None, act: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layer, self.act, self.calls = layer, act, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.layer is None or self.act is None else self.act(self.layer(x))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
