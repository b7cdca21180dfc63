"""A linear layer whose outputs are float32 whatever its inputs are, as the gates of experts are: op `wide_linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops.capability import Capability, Verdict, compute_capability, on_cuda
from deepspeed.ops.registry import implementation, op, reference

__all__ = ["in_two_parts", "wide_linear", "wide_linear_reference"]


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, out] in float32: x [rows, in] times the transpose of the weight [out, in], as in float32."""
    result: Tensor = op("wide_linear")(x, weight)
    return result


@reference("wide_linear")
def wide_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """By copies in float32."""
    return functional.linear(x.float(), weight.float())


def in_two_parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 2 × columns]: float32 values rounded to a dtype, and beside them what was rounded off."""
    high = values.to(dtype)
    return torch.cat((high, (values - high).to(dtype)), dim=1)


class _WideLinear(torch.autograd.Function):
    """Products of bfloat16 are exact in float32, in which tensor cores sum them: no copy of the inputs is needed.

    A gradient has more digits than bfloat16 and goes through these products in two parts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        parts = in_two_parts(grad, x.dtype)
        to_x = parts @ torch.cat((weight, weight)) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            both = torch.mm(parts.t(), x, out_dtype=torch.float32)
            to_weight = both.view(2, *weight.shape).sum(0).to(weight.dtype)
        return to_x, to_weight


def _probe() -> Verdict:
    if "dtype" in torch.ops.aten.mm.overloads():
        return Verdict(True, "torch's products have an out_dtype")
    return Verdict(False, f"torch {torch.__version__} has no products with an out_dtype")


@implementation(
    "wide_linear",
    name="tensor_cores",
    requires=on_cuda & compute_capability(8) & Capability("products with an out_dtype", _probe),
    rank=20,
)
def _load() -> Callable[[Tensor, Tensor], Tensor]:
    def by_tensor_cores(x: Tensor, weight: Tensor) -> Tensor:
        if not (x.is_cuda and x.dim() == 2 and x.dtype == weight.dtype == torch.bfloat16):
            return wide_linear_reference(x, weight)
        result: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
        return result

    return by_tensor_cores
