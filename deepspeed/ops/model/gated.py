"""The middle of feed-forward layers: act(gate) · up, op `gated`, and GELU of x + bias, op `bias_gelu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops.model.linear import rows_of, shaped, takes
from deepspeed.ops.registry import by_triton, op, reference

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) · up, computed in float32 and rounded once; `kind` is one of ACTIVATIONS."""
    result: Tensor = op("gated")(gate, up, kind)
    return result


def halves(both: Tensor, kind: str) -> Tensor:
    """The same for gate and up side by side in the last dim, as one product gives them."""
    result: Tensor = op("gated_halves")(both, kind)
    return result


def halves_values(both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(`halves` of a matrix, their largest magnitude as a float32 scalar); for those who differentiate themselves."""
    result: tuple[Tensor, Tensor] = op("gated_values")(both, kind)
    return result


def halves_slopes(grad: Tensor, both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(the gradient of `both` for that of `halves`, its largest magnitude as a float32 scalar)."""
    result: tuple[Tensor, Tensor] = op("gated_slopes")(grad, both, kind)
    return result


@reference("gated")
def gated_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return (ACTIVATIONS[kind](gate.float()) * up.float()).to(gate.dtype)


@reference("gated_halves")
def halves_reference(both: Tensor, kind: str) -> Tensor:
    gate, up = both.chunk(2, -1)
    return gated_reference(gate, up, kind)


@reference("gated_values")
@torch.no_grad()
def values_reference(both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    y = halves_reference(both, kind)
    return y, _largest(y)


@reference("gated_slopes")
def slopes_reference(grad: Tensor, both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        both = both.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(halves_reference(both, kind), both, grad)
    return slopes, _largest(slopes)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


class Gated(torch.autograd.Function):
    """The Triton kernels; nothing but their inputs is kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        from deepspeed.ops.model.kernels.gated import gated_forward

        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return shaped(gated_forward(rows_of(gate), rows_of(up), kind), gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.gated import gated_backward

        gate, up = map(rows_of, ctx.saved_tensors)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        gated_backward(rows_of(dy), gate, up, dgate, dup, ctx.kind)
        return dgate.view(dy.shape), dup.view(dy.shape), None


class Halves(torch.autograd.Function):
    """As `Gated`; the two gradients are written side by side, where the next product reads them."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, kind: str) -> Tensor:
        from deepspeed.ops.model.kernels.gated import gated_forward

        ctx.save_for_backward(both)
        ctx.kind = kind
        gate, up = rows_of(both).chunk(2, -1)
        return shaped(gated_forward(gate, up, kind), torch.Size((*both.shape[:-1], gate.shape[-1])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.gated import gated_backward

        (both,) = ctx.saved_tensors
        result = torch.empty(both.shape, dtype=both.dtype, device=both.device)
        (gate, up), (dgate, dup) = rows_of(both).chunk(2, -1), rows_of(result).chunk(2, -1)
        gated_backward(rows_of(dy), gate, up, dgate, dup, ctx.kind)
        return result, None


@by_triton("gated")
def gated_triton(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if not takes(gate) or gate.dtype != up.dtype:
        return gated_reference(gate, up, kind)
    result: Tensor = Gated.apply(gate, up, kind)  # type: ignore[no-untyped-call]
    return result


@by_triton("gated_halves")
def halves_triton(both: Tensor, kind: str) -> Tensor:
    if not takes(both):
        return halves_reference(both, kind)
    result: Tensor = Halves.apply(both, kind)  # type: ignore[no-untyped-call]
    return result


@by_triton("gated_values")
def values_triton(both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if not takes(both):
        return values_reference(both, kind)
    from deepspeed.ops.model.kernels.gated import gated_forward

    largest = torch.zeros((), dtype=torch.float32, device=both.device)
    gate, up = both.chunk(2, -1)
    return gated_forward(gate, up, kind, largest), largest


@by_triton("gated_slopes")
def slopes_triton(grad: Tensor, both: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if not takes(both):
        return slopes_reference(grad, both, kind)
    from deepspeed.ops.model.kernels.gated import gated_backward

    largest = torch.zeros((), dtype=torch.float32, device=both.device)
    slopes = torch.empty_like(both)
    (gate, up), (dgate, dup) = both.chunk(2, -1), slopes.chunk(2, -1)
    gated_backward(grad.contiguous(), gate, up, dgate, dup, kind, largest)
    return slopes, largest


FORMS = ("gelu", "gelu_tanh")
"""By the error function, and its approximation by tanh."""


def bias_gelu(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """GELU of x + bias, computed in float32 and rounded once, in x's dtype; bias is [last dim of x], kind of FORMS."""
    result: Tensor = op("bias_gelu")(x, bias, kind)
    return result


@reference("bias_gelu")
def bias_gelu_reference(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    return ACTIVATIONS[kind](x.float() + bias.float()).to(x.dtype)


class BiasGelu(torch.autograd.Function):
    """The Triton kernels; nothing but their inputs is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        from deepspeed.ops.model.kernels.gated import bias_gelu_forward

        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return shaped(bias_gelu_forward(rows_of(x), bias, kind), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.model.kernels.gated import bias_gelu_backward

        x, bias = ctx.saved_tensors
        dx, dbias = bias_gelu_backward(rows_of(dy), rows_of(x), bias, ctx.kind)
        return dx.view(dy.shape), dbias.to(bias.dtype), None


@by_triton("bias_gelu")
def bias_gelu_triton(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    if not takes(x):
        return bias_gelu_reference(x, bias, kind)
    result: Tensor = BiasGelu.apply(x, bias, kind)  # type: ignore[no-untyped-call]
    return result
