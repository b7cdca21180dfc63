"""A column layer whose input gradients are summed over ranks beside the product for its weight's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel import AxisGroup

__all__ = ["overlapped_linear"]


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


def overlapped_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, axis: AxisGroup) -> Tensor:
    """`linear` of a whole input by this rank's rows; the same numbers as without overlap."""
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.get_autocast_dtype(inputs.device.type)
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _Overlapped.apply(inputs, weight, bias, axis)  # type: ignore[no-any-return,no-untyped-call]
