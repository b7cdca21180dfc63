"""The last projection and its cross-entropy together, tile by tile, so that logits are never whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.nn import functional

from deepspeed.events import AHEAD
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

_TILE_BYTES = 2**28


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignored: int = -100,
    cap: float | None = None,
) -> Tensor:
    """The sum of the cross-entropies of `labels` under hidden · weightᵀ + bias, in float32.

    hidden is [tokens, width], weight [classes, width]. Gradients are computed on the way, in tiles of tokens, and are
    not rounded by the number of tokens or the loss scale: these come with the gradient of the sum.
    """
    result: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, ignored, cap)  # type: ignore[no-untyped-call]
    return result


def tile_rows(tokens: int, classes: int, itemsize: int) -> int:
    """Tokens of a tile: a few hundred megabytes of logits, in tiles of equal size."""
    most = max(128, _TILE_BYTES // max(1, classes * itemsize))
    tiles = -(-tokens // most)
    return -(-tokens // max(1, tiles))


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, cap: float | None
    ) -> Tensor:
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        dhidden = torch.empty_like(hidden) if wanted[0] else None
        dweight = weight.new_zeros(weight.shape, dtype=torch.float32) if wanted[1] else None
        dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, tile_rows(hidden.shape[0], weight.shape[0], hidden.element_size()))
        for start in range(0, hidden.shape[0], rows):
            tile, stop = hidden[start : start + rows], start + rows
            logits = functional.linear(tile, weight, bias)
            losses = softmax_loss_(logits, labels[start:stop], ignored=ignored, cap=cap, gradient=any(wanted))
            total += losses.sum()
            with record_function(AHEAD):
                if dhidden is not None:
                    torch.mm(logits, weight, out=dhidden[start:stop])
                if dweight is not None:
                    _add_product(dweight, logits.t(), tile)
                if dbias is not None:
                    dbias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else torch.mul(grad, dtotal, out=torch.empty_like(grad, dtype=dtype))
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, kept in float32: a sum over many tiles would lose bits in a narrower one."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)  # in the product's last pass
    else:
        total.addmm_(a.float(), b.float())


def softmax_loss_(
    logits: Tensor, labels: Tensor, *, ignored: int, cap: float | None = None, gradient: bool = True
) -> Tensor:
    """The loss of each row in float32, 0 where the label is `ignored`; with `gradient`, logits become its gradients."""
    result: Tensor = op("softmax_loss")(logits, labels, ignored=ignored, cap=cap, gradient=gradient)
    return result


@reference("softmax_loss")
@torch.no_grad()
def softmax_loss_reference_(
    logits: Tensor, labels: Tensor, *, ignored: int, cap: float | None = None, gradient: bool = True
) -> Tensor:
    bent = torch.tanh(logits.float() / cap) if cap is not None else None
    wide = logits.float() if bent is None or cap is None else cap * bent
    losses = functional.cross_entropy(wide, labels, ignore_index=ignored, reduction="none")
    if gradient:
        counts = labels != ignored
        slopes = torch.softmax(wide, -1)
        slopes[torch.arange(len(labels), device=labels.device), labels.where(counts, 0)] -= 1
        slopes *= counts.unsqueeze(1)
        logits.copy_(slopes if bent is None else slopes * (1 - bent * bent))
    return losses


@by_triton("softmax_loss")
def softmax_loss_triton_(
    logits: Tensor, labels: Tensor, *, ignored: int, cap: float | None = None, gradient: bool = True
) -> Tensor:
    from deepspeed.ops.model.kernels.cross_entropy import softmax_loss_ as kernel

    chosen = kernel if takes(logits) and logits.stride(-1) == 1 else softmax_loss_reference_
    result: Tensor = chosen(logits, labels, ignored=ignored, cap=cap, gradient=gradient)
    return result
