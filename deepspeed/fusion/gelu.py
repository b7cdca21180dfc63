"""A linear layer with a bias and the GELU behind it: the bias, the activation and their gradients in one pass each.

The layer computes both, since its parameters may be there only while it runs, and the activation hands on what it gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.again import not_kept
from deepspeed.fusion.feed_forward import is_gated
from deepspeed.fusion.likeness import alike, attempt, overridden, stand_in
from deepspeed.fusion.swap import TOKENS, Refused, Swap, Undo, put_forward, whole_shape
from deepspeed.ops.model.bias_gelu import FORMS, bias_gelu
from deepspeed.ops.model.gated import ACTIVATIONS
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["LinearGelu", "find_gelu"]

_WIDTH = 8
Product = Callable[[Tensor, Tensor], Tensor]


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
        yield layer, _swap(module.get_submodule(layer), child, kind, alone)


def _swap(layer: nn.Module, act: nn.Module, kind: str, alone: Callable[[nn.Module], bool]) -> Swap | Refused:
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
    run = LinearGelu(kind, product)

    def put() -> Undo:
        first, second = put_forward(layer, run.run, compiled=run.plain), put_forward(act, _through, compiled=_through)

        def undo() -> None:
            first()
            second()

        return undo

    return Swap(f"bias and {kind}", put, partial(_scene, kind, whole_shape(bias)[0]))


def _scene(kind: str, width: int, *, dtype: torch.dtype) -> None:
    forth_and_back(lambda x, bias: bias_gelu(x, bias, kind), (TOKENS, width), (width,), dtype=dtype)


class LinearGelu:
    """What one layer computes: its product, then the bias and the GELU."""

    def __init__(self, kind: str, product: Product) -> None:
        self.kind, self.product = kind, product

    def run(self, module: Any, input: Tensor) -> Tensor:
        with not_kept(input, module):
            inner = self.product(input, module.weight)
        return bias_gelu(inner, module.bias, self.kind)

    def plain(self, module: Any, input: Tensor) -> Tensor:
        """As a compiler gets to see it."""
        return ACTIVATIONS[self.kind](self.product(input, module.weight) + module.bias)

    def multiply_by(self, product: Product) -> Undo:
        """Take another product from now on."""
        before, self.product = self.product, product

        def undo() -> None:
            self.product = before

        return undo


def _through(self: Any, input: Tensor) -> Tensor:
    return input


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
    expected = attempt(lambda: type(module).forward(stand_in(module, {}, stubs), x))
    if not isinstance(expected, Tensor):
        return None
    for name, child in module.named_children():
        if _has_parameters(child):
            layer, through = _Counted(stubs[name], ACTIVATIONS[kind]), _Counted(None, None)
            twin = stand_in(module, {}, {**stubs, name: layer, act: through})
            same = alike(lambda twin=twin: type(module).forward(twin, x), expected)  # type: ignore[misc]
            if same and (layer.calls, through.calls) == (1, 1):
                return name
    return None


def _stub(child: nn.Module) -> nn.Module:
    """Something small that stands for a child: a square layer where it has parameters, else itself without dropout."""
    if _has_parameters(child):
        made = nn.Linear(_WIDTH, _WIDTH, device="cpu", dtype=torch.float32)
        numbers = torch.Generator().manual_seed(1)
        made.weight.data, made.bias.data = (torch.randn(p.shape, generator=numbers) for p in made.parameters())
        return made
    twin = copy.copy(child)
    twin.training = False
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
