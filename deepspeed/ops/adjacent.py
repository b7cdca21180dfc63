"""Tensors that lie side by side in memory, and are seen as one without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["lay_side_by_side", "merged", "stacked"]

_ALIGNED = 16  # bytes: what the kernels of torch ask of every matrix


def stacked(params: Sequence[Tensor]) -> Tensor:
    """[n, …]: the tensors as one, without a copy if they lie in one memory at equal distances."""
    result = merged([[each] for each in params])
    return torch.stack(list(params)) if result is None else result


def merged(rows: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """[n, sum of first dims, …]: the tensors of each row one behind the other, without a copy; None if that cannot be.

    The tensors of a row have to lie directly behind each other, and the rows at equal distances.
    """
    step = _distance(rows)
    if step is None:
        return None
    result: Tensor = _Adjacent.apply(step, len(rows), *(each for row in rows for each in row))  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def lay_side_by_side(rows: Sequence[Sequence[Tensor]]) -> None:
    """Move parameters into one memory, each row behind the one before; rows are alike.

    Those that have no values of their own stay where they are.
    """
    first = rows[0]
    kinds = {(each.dtype, each.device) for row in rows for each in row}
    alike = len({tuple(each.shape for each in row) for row in rows}) == 1
    whole = alike and len(kinds) == 1 and not first[0].is_meta and all(each.numel() for each in first)
    if not whole or len(rows) * len(first) < 2:
        return
    unit = max(1, _ALIGNED // first[0].element_size()) if len(rows) > 1 else 1
    starts = [0]
    for each in first:
        starts.append(starts[-1] + -(-each.numel() // unit) * unit)
    step = starts.pop()
    columns = [[[row[at]] for row in rows] for at in range(len(first))] if len(rows) > 1 else [rows]
    if all(_distance(column) == step for column in columns):
        return
    memory = first[0].new_empty(len(rows) * step)
    for number, row in enumerate(rows):
        for each, start in zip(row, starts, strict=True):
            home = memory.narrow(0, number * step + start, each.numel()).view(each.shape)
            each.data = home.copy_(each)


def _distance(rows: Sequence[Sequence[Tensor]]) -> int | None:
    """Elements from one row to the next, if all lie in one memory as `merged` needs them; else None."""
    first, size = rows[0][0], rows[0][0].element_size()
    at = [[each.data_ptr() for each in row] for row in rows]
    lengths = [each.numel() * size for each in rows[0]]
    behind = all(
        here + length == after for row in at for (here, after), length in zip(pairwise(row), lengths, strict=False)
    )
    if not behind or not all(lengths) or not all(each.is_contiguous() for row in rows for each in row):
        return None
    if len(rows) == 1:
        return sum(lengths) // size if _same_memory(rows[0]) else None
    step = at[1][0] - at[0][0]
    even = all(here[0] + step == after[0] for here, after in pairwise(at))
    if not even or step < sum(lengths) or step % size or not _same_memory([first, rows[-1][-1]]):
        return None
    return step // size


def _same_memory(tensors: Sequence[Tensor]) -> bool:
    """True if the first and the last tensor are of one storage, and so is all that lies between them."""
    return tensors[0].untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()


class _Adjacent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: int, rows: int, *params: Tensor) -> Tensor:
        row = params[: len(params) // rows]
        ctx.lengths = [len(each) for each in row]
        first = params[0].detach()
        shape = first.shape if len(row) == 1 else (sum(ctx.lengths), *first.shape[1:])
        return first.as_strided((rows, *shape), (step, *first.stride()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.lengths) == 1:
            return (None, None, *grads[0].unbind())
        return (None, None, *(part for row in grads[0].unbind() for part in row.split(ctx.lengths)))
