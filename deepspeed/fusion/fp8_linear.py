"""Linear layers whose products are of 8-bit numbers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.fusion.equivalence import fits, ordinary, overridden, unwatched, watched_everywhere
from deepspeed.fusion.feed_forward import APART, FeedForward
from deepspeed.fusion.gelu import LinearGelu
from deepspeed.ops.fp8.linear import MULTIPLE, Fp8FeedForward, Fp8Linear, Scaling, round_input
from deepspeed.ops.fp8.product import emulated
from deepspeed.ops.fp8.quantise import Quantized
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import TOKENS, Refused, Swap, put_forward, replacement


def find_product(module: nn.Module, recent: LastRounded) -> Swap | Refused | None:
    """How a linear layer is replaced; None for any other module. Layers of one model share `recent`."""
    if not isinstance(module, nn.Linear):
        return None
    if type(module) is not nn.Linear:
        return Refused(f"{type(module).__name__} is a linear layer of its own kind")
    fused = getattr(replacement(module), "__self__", None)
    if not isinstance(fused, LinearGelu) and (reason := overridden(module)):
        return Refused(reason)
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return Refused(f"{module.in_features} × {module.out_features} is no multiple of {MULTIPLE} on each side")
    name = f"fp8 product, scales by {recent.scaling}"
    linear = Fp8Products(recent)
    put = (
        partial(put_forward, module, linear.run, compiled=linear.run)
        if fused is None
        else partial(fused.multiply_by, linear.product)
    )
    return Swap(name, put, partial(_scene, recent.scaling, module.in_features, module.out_features))


def products_of(layer: nn.Module) -> Fp8Products | None:
    """What computes a layer; None for layers that others may see or change."""
    products = getattr(replacement(layer), "__self__", None)
    return products if isinstance(products, Fp8Products) and unwatched(layer) else None


def _scene(scaling: Scaling, width: int, out: int, *, dtype: torch.dtype) -> None:
    linear = Fp8Products(LastRounded(scaling))  # its own: other threads are using the model's
    forward_and_backward(linear.multiply, (TOKENS, width), (out, width), dtype=dtype)


EXACT: tuple[Scaling, ...] = ("block", "row", "tensor")
"""Recipes, the most exact first."""
WORTH = 1.05
"""A more exact recipe may take so many times as long as the fastest."""


def choose_scaling(
    shapes: Mapping[tuple[int, int], int], dtype: torch.dtype, measure: Callable[..., float] | None = None
) -> tuple[Scaling, dict[Scaling, float]]:
    """The most exact recipe that is about as fast as the fastest for layers (width, out) of all ranks; seconds of each.

    Where 8-bit numbers are multiplied as float32 nothing is measured.
    """
    if measure is None:
        if emulated():
            return EXACT[0], {}
        measure = _seconds
    device = get_accelerator().current_device_name()
    mine = [sum(count * measure(each, *shape, dtype) for shape, count in shapes.items()) for each in EXACT]
    total = torch.tensor(mine, dtype=torch.float32, device=device)
    if comm.is_initialized():
        comm.all_reduce(total)
    seconds = dict(zip(EXACT, total.tolist(), strict=True))
    limit = WORTH * min(seconds.values())
    return next(each for each in EXACT if seconds[each] <= limit), seconds


def _seconds(scaling: Scaling, width: int, out: int, dtype: torch.dtype, times: int = 10) -> float:
    """Forward and backward of a layer, for so many tokens that the device takes longer than the host."""
    accelerator, tokens = get_accelerator(), 4 * TOKENS
    device = accelerator.current_device_name()
    x, weight = (torch.randn(rows, width, dtype=dtype, device=device).requires_grad_() for rows in (tokens, out))
    grad = torch.randn(tokens, out, dtype=dtype, device=device)
    began = 0.0
    for turn in range(-3, times):
        if turn == 0:
            accelerator.synchronize()
            began = time.perf_counter()
        torch.autograd.grad(Fp8Products(LastRounded(scaling)).multiply(x, weight), (x, weight), grad)
    accelerator.synchronize()
    return (time.perf_counter() - began) / times


class LastRounded:
    """The last input that was rounded: the layers that read it one after the other round it once."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rounded: Quantized | None = None

    def rounded(self, x: Tensor, matrix: Tensor) -> Quantized:
        """`matrix`, which holds the numbers of `x` in rows, rounded."""
        if x.is_inference():  # nobody counts how often its numbers change
            return self._round(matrix)
        known = self._source is not None and self._source() is x and self._version == x._version
        if known and self._rounded is not None and self._rounded.columns is None:
            known = not torch.is_grad_enabled()
        if not known or self._rounded is None:
            self._rounded = self._round(matrix)
            self._source, self._version = weakref.ref(x), x._version
        return self._rounded

    def _round(self, matrix: Tensor) -> Quantized:
        return round_input(matrix.detach(), self.scaling, columns=torch.is_grad_enabled())


class Fp8Products:
    """The products of one model's layers."""

    def __init__(self, recent: LastRounded) -> None:
        self.recent = recent

    def run(self, module: Any, input: Tensor) -> Tensor:
        return self.product(input, module.weight, module.bias)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return self.multiply(input, weight, bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`product` of an input in the dtype that it is computed in."""
        return self.several(input, [weight], [bias])[0]

    def several(self, input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        """`multiply` with each of the weights, which are rounded as if they were one."""
        if not input.numel():
            return [functional.linear(input, w.to(input.dtype), b) for w, b in zip(weights, biases, strict=True)]
        return self.of_rows(input, lambda matrix: self._multiplied(input, matrix, weights, biases))

    def of_rows(self, input: Tensor, compute: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """What is computed of the rows of an input, which are made a multiple of what products take."""
        matrix = input.reshape(-1, input.shape[-1])
        short = -matrix.shape[0] % MULTIPLE
        if short:  # zeros change no sum
            matrix = functional.pad(matrix, (0, 0, 0, short))
        outs = compute(matrix)
        # the gradient of a slice is a copy
        return [(out[: out.shape[0] - short] if short else out).view(*input.shape[:-1], -1) for out in outs]

    def _multiplied(
        self, input: Tensor, matrix: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        outs = self._products(input, matrix, weights)
        return [out if bias is None else out.add_(bias.to(out.dtype)) for out, bias in zip(outs, biases, strict=True)]

    def _products(self, input: Tensor, matrix: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        scaling = self.recent.scaling
        if torch.compiler.is_compiling():
            from deepspeed.ops.fp8 import graph

            held = graph.rounded(matrix, scaling)
            return [graph.linear(matrix, weight, held, scaling) for weight in weights]
        rounded = self.recent.rounded(input, matrix)
        outs: tuple[Tensor, ...] = Fp8Linear.apply(matrix, rounded, scaling, *weights)  # type: ignore[no-untyped-call]
        return outs


def find_feed_forward8(module: nn.Module) -> Swap | None:
    """How a feed-forward layer is computed as one, whose activation and products were replaced before; else None."""
    before = replacement(module)
    fused = getattr(before, "__self__", None)
    if before is None or not isinstance(fused, FeedForward) or before.__func__ is not FeedForward.apart:  # type: ignore[attr-defined]
        return None
    layers = _layers(module)
    if layers is None:
        return None
    gate, _, down = layers
    run, products = Fp8FeedForwardLayer(fused), products_of(gate)
    assert products is not None, "looked at"
    plan = fused.kind, products.recent.scaling
    scene = partial(_feed_forward_scene, plan, gate.in_features, gate.out_features, down.out_features)
    return Swap(f"gated {fused.kind} between products", partial(put_forward, module, run.run), scene)


class Fp8FeedForwardLayer:
    """One feed-forward layer."""

    def __init__(self, apart: FeedForward) -> None:
        self._apart = apart

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        layers = None if watched_everywhere() or not ordinary(x) or not x.numel() else _layers(module)
        if layers is None or not all(
            fits(layer, x, width) for layer, width in zip(layers, (None, None, layers[0].out_features), strict=True)
        ):
            return self._apart.apart(module, *args, **kwargs)
        products = products_of(layers[0])
        assert products is not None, "looked at"
        return compute(products, x, self._apart.kind, *(layer.weight for layer in layers))


def compute(products: Fp8Products, x: Tensor, kind: str, *weights: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x)) for the three weights."""

    def of_rows(matrix: Tensor) -> list[Tensor]:
        plan = kind, products.recent.scaling
        return [Fp8FeedForward.apply(matrix, products.recent.rounded(x, matrix), plan, *weights)]  # type: ignore[no-untyped-call]

    return products.of_rows(x, of_rows)[0]


def _layers(module: nn.Module) -> list[nn.Linear] | None:
    """Gate, up and down, if they can be computed as one."""
    found = [module._modules.get(name) for name in APART]
    layers = [layer for layer in found if isinstance(layer, nn.Linear) and products_of(layer) is not None]
    if len(layers) < len(APART) or any(layer.bias is not None for layer in layers):
        return None
    gate, up, down = layers
    matching = (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
    return layers if matching and gate is not up and down.in_features == gate.out_features else None


def _feed_forward_scene(plan: tuple[str, Scaling], width: int, inner: int, out: int, *, dtype: torch.dtype) -> None:
    kind, scaling = plan
    products = Fp8Products(LastRounded(scaling))  # its own: other threads are using the model's
    shapes = (TOKENS, width), (inner, width), (inner, width), (out, inner)
    forward_and_backward(lambda x, *weights: compute(products, x, kind, *weights), *shapes, dtype=dtype)
