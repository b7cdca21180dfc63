"""Tokens to the rows of their assignments and back: one program for each token, one pass over memory each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.model.kernels.common import row_block, warps
from deepspeed.ops.precompile import launch


@triton.jit
def _spread(tokens_ptr, places_ptr, out_ptr, tokens, columns, count, choices, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(tokens_ptr + token * columns + at, mask=inside, other=0.0)
    for choice in range(choices):
        place = tl.load(places_ptr + choice * tokens + token).to(tl.int64)
        tl.store(out_ptr + place * columns + at, value, mask=at < tl.where(place < count, columns, 0))


@triton.jit
def _combine(
    rows_ptr, weights_ptr, places_ptr, out_ptr, tokens, columns, count, choices,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(choices):
        place = tl.load(places_ptr + choice * tokens + token).to(tl.int64)
        kept = at < tl.where(place < count, columns, 0)
        row = tl.load(rows_ptr + place * columns + at, mask=kept, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + choice * tokens + token).to(tl.float32)
        total += row
    tl.store(out_ptr + token * columns + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(
    grad_ptr, rows_ptr, weights_ptr, places_ptr, out_ptr, dots_ptr, tokens, columns, count, choices,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    grad = tl.load(grad_ptr + token * columns + at, mask=inside, other=0.0).to(tl.float32)
    for choice in range(choices):
        place = tl.load(places_ptr + choice * tokens + token).to(tl.int64)
        kept = at < tl.where(place < count, columns, 0)
        row = tl.load(rows_ptr + place * columns + at, mask=kept, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + choice * tokens + token).to(tl.float32)
        tl.store(dots_ptr + choice * tokens + token, tl.sum(row * grad, axis=0))
        tl.store(out_ptr + place * columns + at, (grad * weight).to(out_ptr.dtype.element_ty), mask=kept)


def spread(tokens: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """Write each token [S, M] to the rows of its assignments [k, S] in `out` [count, M]."""
    (choices, count), columns = places.shape, tokens.shape[1]
    if count:
        block = row_block(columns)
        launch(
            _spread, (count,),
            tokens, places, out, count, columns, len(out), choices, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


def combine(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """[S, M]: the rows [count, M] of each token's assignments, weighted [k, S] and summed."""
    (choices, count), columns = places.shape, rows.shape[1]
    out = torch.empty(count, columns, dtype=rows.dtype, device=rows.device)
    if count:
        block = row_block(columns)
        launch(
            _combine, (count,),
            rows, rows if weights is None else weights, places, out, count, columns, len(rows), choices,
            WEIGHTED=weights is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


def slopes(grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the rows, written to `out` [count, M]; that of the weights [k, S]) for that of the sums [S, M]."""
    (choices, count), columns = places.shape, rows.shape[1]
    dots = torch.empty(choices, count, dtype=torch.float32, device=rows.device)
    if count:
        block = row_block(columns)
        launch(
            _slopes, (count,),
            grad, rows, weights, places, out, dots, count, columns, len(rows), choices,
            BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out, dots.to(weights.dtype)
