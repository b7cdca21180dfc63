"""Linear layers whose products are of 8-bit numbers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.gelu import LinearGelu
from deepspeed.fusion.swap import TOKENS, Refused, Swap, put_forward, replacement
from deepspeed.ops.fp8.linear import MULTIPLE, Fp8Linear
from deepspeed.ops.fp8.quantise import Rounded, round_rows, round_tensor
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["Recent", "find_product"]


def find_product(module: nn.Module, recent: Recent) -> Swap | Refused | None:
    """How a linear layer is replaced; None for any other module. Layers of one model share `recent`."""
    if not isinstance(module, nn.Linear):
        return None
    if type(module) is not nn.Linear:
        return Refused(f"{type(module).__name__} is a linear layer of its own kind")
    fused = getattr(replacement(module), "__self__", None)
    if "forward" in module.__dict__ and not isinstance(fused, LinearGelu):
        return Refused("its forward was replaced on the instance")
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return Refused(f"{module.in_features} × {module.out_features} is no multiple of {MULTIPLE} on each side")
    name = f"fp8 product, scales by {'row' if recent.by_rows else 'tensor'}"
    linear = _Linear(recent)
    put = (
        partial(put_forward, module, linear.run, compiled=linear.run)
        if fused is None
        else partial(fused.multiply_by, linear.product)
    )
    return Swap(name, put, partial(_scene, recent.by_rows, module.in_features, module.out_features))


def _scene(by_rows: bool, width: int, out: int, *, dtype: torch.dtype) -> None:
    linear = _Linear(Recent(by_rows=by_rows))  # its own: other threads are using the model's
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


class _Linear:
    """The products of one model's layers."""

    def __init__(self, recent: Recent) -> None:
        self._recent = recent

    def run(self, module: Any, input: Tensor) -> Tensor:
        return self.product(input, module.weight, module.bias)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return self.multiply(input, weight, bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`product` of an input in the dtype that it is computed in."""
        matrix = input.reshape(-1, input.shape[-1])
        short = -matrix.shape[0] % MULTIPLE
        if not matrix.shape[0]:
            return functional.linear(input, weight.to(input.dtype), bias)
        if short:  # zeros change no sum
            matrix = functional.pad(matrix, (0, 0, 0, short))
        out = self._multiplied(input, matrix, weight)
        if bias is not None:
            out = out.add_(bias.to(out.dtype))
        out = out[: out.shape[0] - short] if short else out  # the gradient of a slice is a copy
        return out.view(*input.shape[:-1], weight.shape[0])

    def _multiplied(self, input: Tensor, matrix: Tensor, weight: Tensor) -> Tensor:
        by_rows = self._recent.by_rows
        if torch.compiler.is_compiling():
            from deepspeed.ops.fp8 import graph

            return graph.linear(matrix, weight, graph.rounded(matrix, by_rows), by_rows)
        rounded = self._recent.rounded(input, matrix)
        out: Tensor = Fp8Linear.apply(matrix, weight, rounded, by_rows)  # type: ignore[no-untyped-call]
        return out
