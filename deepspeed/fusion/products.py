"""Linear layers whose products are of 8-bit numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.gelu import LinearGelu
from deepspeed.fusion.layers import unwatched
from deepspeed.fusion.likeness import overridden
from deepspeed.fusion.swap import TOKENS, Refused, Swap, put_forward, replacement
from deepspeed.ops.fp8.linear import MULTIPLE, Fp8Linear
from deepspeed.ops.fp8.quantise import Rounded, round_rows, round_tensor
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["Products", "Recent", "find_product", "products_of"]


def find_product(module: nn.Module, recent: Recent) -> Swap | Refused | None:
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
    name = f"fp8 product, scales by {'row' if recent.by_rows else 'tensor'}"
    linear = Products(recent)
    put = (
        partial(put_forward, module, linear.run, compiled=linear.run)
        if fused is None
        else partial(fused.multiply_by, linear.product)
    )
    return Swap(name, put, partial(_scene, recent.by_rows, module.in_features, module.out_features))


def products_of(layer: nn.Module) -> Products | None:
    """What computes a layer with one scale for each tensor; None for layers that others may see or change."""
    products = getattr(replacement(layer), "__self__", None)
    found = isinstance(products, Products) and unwatched(layer) and not products.recent.by_rows
    return products if found else None


def _scene(by_rows: bool, width: int, out: int, *, dtype: torch.dtype) -> None:
    linear = Products(Recent(by_rows=by_rows))  # its own: other threads are using the model's
    forth_and_back(linear.multiply, (TOKENS, width), (out, width), dtype=dtype)


class Recent:
    """The last input that was rounded: the layers that read it one after the other round it once."""

    def __init__(self, *, by_rows: bool) -> None:
        self.by_rows = by_rows
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rounded: Rounded | None = None

    def rounded(self, x: Tensor, matrix: Tensor) -> Rounded:
        """`matrix`, which holds the numbers of `x` in rows, rounded."""
        if x.is_inference():  # nobody counts how often its numbers change
            return self._round(matrix)
        known = self._source is not None and self._source() is x and self._version == x._version
        if known and self._rounded is not None and self._rounded.columns is None:
            known = self.by_rows or not torch.is_grad_enabled()
        if not known or self._rounded is None:
            self._rounded = self._round(matrix)
            self._source, self._version = weakref.ref(x), x._version
        return self._rounded

    def _round(self, matrix: Tensor) -> Rounded:
        if self.by_rows:
            return round_rows(matrix.detach(), torch.float8_e4m3fn)
        return round_tensor(matrix.detach(), torch.float8_e4m3fn, columns=torch.is_grad_enabled())


class Products:
    """The products of one model's layers."""

    def __init__(self, recent: Recent) -> None:
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
        by_rows = self.recent.by_rows
        if torch.compiler.is_compiling():
            from deepspeed.ops.fp8 import graph

            held = graph.rounded(matrix, by_rows)
            return [graph.linear(matrix, weight, held, by_rows) for weight in weights]
        rounded = self.recent.rounded(input, matrix)
        outs: tuple[Tensor, ...] = Fp8Linear.apply(matrix, rounded, by_rows, *weights)  # type: ignore[no-untyped-call]
        return outs
