"""Products beside sums over ranks, which cost no time then as long as the products last.

Backward of a column layer: its input's gradient is summed while the product for its weight's gradient runs. Forward of
a row layer: its product is computed in two halves, and the first is summed while the second is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel import AxisGroup

__all__ = ["overlapped_linear", "overlapped_sum"]


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, axis: AxisGroup) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.axis, ctx.has_bias = axis, bias is not None
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        to_inputs = to_weight = to_bias = work = None
        if ctx.needs_input_grad[0]:
            to_inputs = grad.matmul(weight).contiguous()
            work = comm.all_reduce(to_inputs, group=ctx.axis.group, async_op=True)
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            to_weight = flat.t().matmul(inputs.reshape(-1, inputs.shape[-1]))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        if work is not None:
            work.wait()
        return to_inputs, to_weight, to_bias, None


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, axis: AxisGroup) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = rows.new_empty((*inputs.shape[:-1], weight.shape[0]))
        works = []
        parts = output.view(-1, weight.shape[0]).tensor_split(2)
        halves = [half for half in zip(rows.tensor_split(2), parts, strict=True) if len(half[0])]
        for given, part in halves:
            torch.mm(given, weight.t(), out=part)
            works.append(comm.all_reduce(part, group=axis.group, async_op=True))
        for work in works:
            assert work is not None, "it was asked for"
            work.wait()
        return output  # no view of it, which models could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        to_inputs = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(inputs.reshape(-1, inputs.shape[-1]))
        return to_inputs, to_weight, None


def overlapped_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, axis: AxisGroup) -> Tensor:
    """`linear` of a whole input by this rank's rows; the same numbers as without overlap."""
    inputs, weight, bias = _cast(inputs, weight, bias)
    return _Overlapped.apply(inputs, weight, bias, axis)  # type: ignore[no-any-return,no-untyped-call]


def overlapped_sum(inputs: Tensor, weight: Tensor, axis: AxisGroup) -> Tensor:
    """The sum over ranks of `linear` of their inputs by their columns; the same numbers as without overlap."""
    inputs, weight, _ = _cast(inputs, weight, None)
    return _Halves.apply(inputs, weight, axis)  # type: ignore[no-any-return,no-untyped-call]


def _cast(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast does it with the arguments of a product."""
    if not torch.is_autocast_enabled(inputs.device.type):
        return inputs, weight, bias
    dtype = torch.get_autocast_dtype(inputs.device.type)
    return inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
