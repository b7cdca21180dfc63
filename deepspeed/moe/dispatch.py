"""Tokens to the rows of their experts and back, with the way back of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.moe.routing import Routes
from deepspeed.ops.grouped import Groups
from deepspeed.ops.model.assignments import Places
from deepspeed.ops.registry import op

__all__ = ["Dispatch", "by_slots", "in_order"]


@dataclass(frozen=True)
class Dispatch:
    """Which row each assignment has among those of the experts."""

    places: Places

    def to_rows(self, tokens: Tensor) -> Tensor:
        """[count, M] of [S, M]; empty rows are 0."""
        moved: Tensor = _ToRows.apply(tokens, self.places)  # type: ignore[no-untyped-call]
        return moved

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[S, M] of [count, M]: each token's rows, weighted [k, S] and summed in float32."""
        summed: Tensor = _Combine.apply(rows, weights, self.places)  # type: ignore[no-untyped-call]
        return summed


def by_slots(routes: Routes, capacity: int) -> Dispatch:
    """Every expert has `capacity` rows, filled from the front."""
    count = routes.num_experts * capacity
    rows = torch.where(routes.kept, routes.experts * capacity + routes.places, count)
    return Dispatch(Places(rows.contiguous(), count, full=False))


def in_order(experts: Tensor, count: int) -> tuple[Dispatch, Groups]:
    """Experts [k, S] have as many rows as they were chosen, one behind the other; dropped assignments have one, too.

    Beside it the groups of rows, one for each of `count` experts.
    """
    flat = experts.reshape(-1)
    narrow = torch.uint8 if count <= 256 else torch.int16 if count <= 2**15 else torch.int64
    ordered, sources = torch.sort(flat.to(narrow), stable=True)  # fewer digits to sort by
    rows = torch.empty_like(sources)
    rows[sources] = torch.arange(flat.numel(), device=flat.device)
    numbers = torch.arange(count, device=flat.device, dtype=narrow)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return Dispatch(Places(rows.view(experts.shape), flat.numel(), full=True, sorted=sources)), Groups(count, ends=ends)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Places) -> Tensor:
        ctx.places = places
        rows: Tensor = op("spread_rows")(tokens, places)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return op("combine_rows")(grads[0], None, ctx.places), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Places) -> Tensor:
        ctx.places = places
        ctx.save_for_backward(rows, weights)
        tokens: Tensor = op("combine_rows")(rows, weights, places)
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        to_rows, to_weights = op("combine_slopes")(grads[0], rows, weights, ctx.places, ctx.needs_input_grad[:2])
        return to_rows, to_weights, None
