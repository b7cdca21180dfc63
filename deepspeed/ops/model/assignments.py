"""Tokens and the rows that experts compute of them: ops `spread_rows`, `combine_rows` and `combine_slopes`.

An assignment is one choice of one token; each has a row, or none where it is dropped. No atomics: the same bits in
every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepspeed.ops.model.linear import takes_rows
from deepspeed.ops.registry import by_triton, reference

Slopes = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class RowAssignment:
    """Which row each assignment has."""

    rows: Tensor
    """[k, S], contiguous: the row of each assignment; `count` for what is dropped."""
    count: int
    """Rows in all."""
    full: bool
    """No row is empty and nothing is dropped."""
    sorted: Tensor | None = None
    """What `sources` is, where it is known anyway."""

    @cached_property
    def sources(self) -> Tensor:
        """[count]: the assignment of each row, k × S for an empty one; assignment i is of token i mod S."""
        if self.sorted is not None:
            return self.sorted
        flat = self.rows.reshape(-1)  # what is dropped is written behind the end, which is cut off
        sources = torch.full((self.count + 1,), flat.numel(), device=flat.device, dtype=flat.dtype)
        sources[flat] = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
        return sources[: self.count]

    @cached_property
    def tokens(self) -> Tensor:
        """[count]: the token of each row, S for an empty one."""
        choices, tokens = self.rows.shape
        if choices == 1:
            return self.sources
        if self.full:
            return self.sources % max(tokens, 1)
        return torch.where(self.sources < choices * tokens, self.sources % max(tokens, 1), tokens)


@reference("spread_rows")
def spread_reference(tokens: Tensor, places: RowAssignment) -> Tensor:
    """[count, M] of [S, M]: every row its token; empty rows are 0."""
    return _pick(tokens, places.tokens, places.full)


@reference("combine_rows")
def combine_reference(rows: Tensor, weights: Tensor | None, places: RowAssignment) -> Tensor:
    """[S, M] of [count, M]: the rows of each token, weighted [k, S], summed in float32 and rounded once."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    picked = [_pick(rows, chosen, places.full) for chosen in places.rows]
    if weights is None:
        total = picked[0] if len(picked) == 1 else picked[0].to(wide)
        for other in picked[1:]:
            total += other
        return total.to(rows.dtype)
    factors = weights.to(wide).unsqueeze(-1)  # [k, S, 1]
    total = picked[0].to(wide).mul_(factors[0])
    for other, factor in zip(picked[1:], factors[1:], strict=True):
        total.addcmul_(other, factor)
    return total.to(rows.dtype)


@reference("combine_slopes")
def slopes_reference(
    grad: Tensor, rows: Tensor, weights: Tensor, places: RowAssignment, wanted: tuple[bool, bool] = (True, True)
) -> Slopes:
    """The gradients of `combine_rows`: of its rows [count, M] and of its weights [k, S], as far as wanted."""
    spread = _pick(grad, places.tokens, places.full)
    to_weights = None
    if wanted[1]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        dots = (rows.to(wide) * spread).sum(1)  # [count]
        to_weights = _pick(dots, places.rows.reshape(-1), places.full).view_as(places.rows).to(weights.dtype)
    scale = _pick(weights.reshape(-1), places.sources, places.full)
    return spread.mul_(scale.unsqueeze(1)) if wanted[0] else None, to_weights


def _pick(values: Tensor, chosen: Tensor, full: bool) -> Tensor:
    """Rows of `values` in memory of their own; zeros where one behind the end is chosen."""
    if full:
        return values.index_select(0, chosen)
    if len(values) == 0:
        return values.new_zeros(len(chosen), *values.shape[1:])
    picked = values.index_select(0, chosen.clamp(max=len(values) - 1))
    outside = chosen >= len(values)
    if values.device.type == "cpu":  # where nobody waits for a number of rows, only these are written
        return picked.index_fill_(0, outside.nonzero().view(-1), 0)
    return picked.masked_fill_(outside.view(-1, *[1] * (values.dim() - 1)), 0)


@by_triton("spread_rows")
def spread_triton(tokens: Tensor, places: RowAssignment) -> Tensor:
    if not takes_rows(tokens):
        return spread_reference(tokens, places)
    from deepspeed.ops.model.kernels.assignments import spread

    return spread(tokens.contiguous(), places.rows, _room(tokens, places))


@by_triton("combine_rows")
def combine_triton(rows: Tensor, weights: Tensor | None, places: RowAssignment) -> Tensor:
    if not takes_rows(rows):
        return combine_reference(rows, weights, places)
    from deepspeed.ops.model.kernels.assignments import combine

    return combine(rows.contiguous(), None if weights is None else weights.contiguous(), places.rows)


@by_triton("combine_slopes")
def slopes_triton(
    grad: Tensor, rows: Tensor, weights: Tensor, places: RowAssignment, wanted: tuple[bool, bool] = (True, True)
) -> Slopes:
    """By the kernel where it can: the gradient is read once for both."""
    if not takes_rows(rows) or not all(wanted):
        return slopes_reference(grad, rows, weights, places, wanted)
    from deepspeed.ops.model.kernels.assignments import slopes

    return slopes(grad.contiguous(), rows.contiguous(), weights.contiguous(), places.rows, _room(rows, places))


def _room(like: Tensor, places: RowAssignment) -> Tensor:
    """[count, M], not filled where every row will be written."""
    make = torch.empty if places.full else torch.zeros
    return make(places.count, like.shape[1], dtype=like.dtype, device=like.device)
