"""Cross-entropy of rows of logits, which become their own gradients in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import next_power
from deepspeed.ops.precompile import launch

_BLOCK = 8192


@triton.jit
def _loss(
    logits_ptr, stride, labels_ptr, loss_ptr, columns, ignored, cap,
    CAPS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    start = logits_ptr + row * stride
    if label == ignored:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for first in range(0, columns, BLOCK):
                at = first + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), dtype=logits_ptr.dtype.element_ty)
                tl.store(start + at, zeros, mask=at < columns)
        return
    highest = float("-inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        if CAPS:
            x = tl.where(at < columns, cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0), float("-inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        highest = higher
    known = (label >= 0) & (label < columns)  # what is outside of the row belongs to others
    chosen = tl.load(start + label, mask=known, other=float("nan")).to(tl.float32)
    if CAPS:
        chosen = cap * (2.0 * tl.sigmoid(2.0 * chosen / cap) - 1.0)
    tl.store(loss_ptr + row, highest + tl.log(total) - chosen)
    if GRADIENT:
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            slope = tl.where(known, 1.0, float("nan"))
            if CAPS:
                bent = 2.0 * tl.sigmoid(2.0 * x / cap) - 1.0
                x = tl.where(at < columns, cap * bent, float("-inf"))
                slope *= 1.0 - bent * bent
            gradient = (tl.exp(x - highest) / total - tl.where(at == label, 1.0, 0.0)) * slope
            tl.store(start + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < columns)


def softmax_loss_(
    logits: Tensor, labels: Tensor, *, ignored: int, cap: float | None = None, gradient: bool = True
) -> Tensor:
    """The loss of each row in float32, 0 where the label is `ignored`; `logits` become the gradients of these losses.

    `cap` bends logits to cap · tanh(logits / cap) first. A label that is none of the columns gives NaN: nobody waits
    for the device to tell of it.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, next_power(columns))
    if rows:
        launch(
            _loss, (rows,),
            logits, logits.stride(0), labels, losses, columns, ignored, cap or 1.0,
            CAPS=cap is not None, GRADIENT=gradient, BLOCK=block, num_warps=16,
        )  # fmt: skip
    return losses
