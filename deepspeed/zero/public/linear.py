"""A linear layer whose backward uses the parameter itself, so that the weight may be released after forward.

[Note: a linear without a saved weight]
torch's linear saves a view of the weight's memory for backward. If the weight is released by giving it other memory,
that view keeps the old memory alive until backward, and hooks that offload activations would copy it. Here the graph
holds the parameter object and reads its memory when backward comes, which is after it was gathered again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.errors import UsageError

__all__ = ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"]


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """input · weightᵀ + bias; see [Note: a linear without a saved weight]."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `torch.nn.functional.linear`."""
        return functional.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what backward needs of input and weight, and the autocast that forward ran under."""
        input, weight = inputs[0], inputs[1]
        for_input, for_weight = ctx.needs_input_grad[:2]
        # A weight that is no parameter was computed: only autograd knows how to keep it.
        owned = isinstance(weight, nn.Parameter)
        ctx.weight = weight if for_input and owned else None
        ctx.shape, ctx.version = weight.shape, weight._version
        ctx.save_for_backward(input if for_weight else None, weight if for_input and not owned else None)
        # torch.amp.custom_fwd does the same for one device type that must be known when the class is made.
        device = input.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Only the gradients that are needed."""
        grad = grads[0]
        input, weight = ctx.saved_tensors
        weight = ctx.weight if weight is None else weight
        for_input, for_weight, *for_bias = ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        device, dtype, enabled = ctx.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            if for_input:
                if ctx.weight is not None:
                    _check_unchanged(ctx)
                of_input = grad.matmul(weight)
            if for_weight:
                of_weight = _rows(grad).t().matmul(_rows(input))
            if any(for_bias):
                of_bias = _rows(grad).sum(0)
        return (of_input, of_weight, of_bias)[: len(ctx.needs_input_grad)]


class LinearModuleForZeroStage3(nn.Linear):
    """`nn.Linear` that computes by `zero3_linear_wrap`."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return zero3_linear_wrap(input, self.weight, self.bias)


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` whose graph keeps the parameter and no view of its memory."""
    if not torch.is_grad_enabled():
        return functional.linear(input, weight, bias)
    arguments = (input, weight) if bias is None else (input, weight, bias)
    result: Tensor = LinearFunctionForZeroStage3.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _check_unchanged(ctx: Any) -> None:
    """What autograd checks of tensors that it saves, and that the weight is there."""
    shape, version = ctx.weight.shape, ctx.weight._version
    if shape != ctx.shape:
        raise UsageError(
            f"backward of a linear layer found its weight with shape {tuple(shape)}, forward used {tuple(ctx.shape)}: "
            "it was released and not gathered again. Call the layer as a module, or name its user with "
            "deepspeed.zero.register_external_parameter(module, weight)"
        )
    if version != ctx.version:
        raise UsageError(
            f"the weight of shape {tuple(shape)} of a linear layer was written in place {version - ctx.version} times "
            "between its forward and its backward, so that the gradient would be wrong; run backward first"
        )


def _rows(tensor: Tensor) -> Tensor:
    """[..., features] as [rows, features]."""
    return tensor.reshape(-1, tensor.shape[-1])
