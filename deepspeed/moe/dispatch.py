"""Tokens to the rows of their experts and back, by two gathers each way: no atomics, the same bits in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.moe.routing import Routes, count_of

__all__ = ["Dispatch", "by_slots", "in_order"]


@dataclass(frozen=True)
class Dispatch:
    """Which row each assignment has among those of the experts."""

    rows: Tensor
    """[k, S]: the row of each assignment; `count` for what is dropped."""
    sources: Tensor
    """[count]: the assignment of each row, k × S for an empty one; assignment i is of token i mod S."""
    count: int
    full: bool
    """No row is empty and nothing is dropped."""
    experts: Tensor
    """[k, S]: the expert of each assignment."""

    def counts(self, experts: int) -> Tensor:
        """[experts]: assignments of each."""
        return count_of(self.experts.reshape(-1), experts)

    def to_rows(self, tokens: Tensor) -> Tensor:
        """[count, M] of [S, M]; empty rows are 0."""
        moved: Tensor = _ToRows.apply(tokens, self)  # type: ignore[no-untyped-call]
        return moved

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[S, M] of [count, M]: each token's rows, weighted [k, S] and summed in float32."""
        summed: Tensor = _Combine.apply(rows, weights, self)  # type: ignore[no-untyped-call]
        return summed


def by_slots(routes: Routes, capacity: int) -> Dispatch:
    """Every expert has `capacity` rows, filled from the front."""
    count = routes.num_experts * capacity
    rows = torch.where(routes.kept, routes.experts * capacity + routes.places, count)
    return Dispatch(rows, _sources(rows, count), count, False, routes.experts)


def in_order(experts: Tensor) -> Dispatch:
    """Experts [k, S] have as many rows as they were chosen, one behind the other; dropped assignments have one, too."""
    flat = experts.reshape(-1)
    sources = torch.argsort(flat, stable=True)
    rows = torch.empty_like(flat)
    rows[sources] = torch.arange(flat.numel(), device=flat.device)
    return Dispatch(rows.view_as(experts), sources, flat.numel(), True, experts)


def _sources(rows: Tensor, count: int) -> Tensor:
    """The inverse of `rows`; what is dropped is written behind the end, which is cut off."""
    flat = rows.reshape(-1)
    sources = torch.full((count + 1,), flat.numel(), device=rows.device, dtype=rows.dtype)
    sources[flat] = torch.arange(flat.numel(), device=rows.device, dtype=rows.dtype)
    return sources[:count]


def _pick(values: Tensor, places: Tensor, full: bool) -> Tensor:
    """Rows of `values`; zeros where a place is behind its end."""
    if full:
        return values.index_select(0, places)
    if len(values) == 0:
        return values.new_zeros(len(places), *values.shape[1:])
    picked = values.index_select(0, places.clamp(max=len(values) - 1))
    outside = places >= len(values)
    return picked.masked_fill_(outside.view(-1, *[1] * (values.dim() - 1)), 0)


def _tokens_of(plan: Dispatch) -> Tensor:
    """[count]: the token of each row, S for an empty one."""
    choices, tokens = plan.rows.shape
    if choices == 1:
        return plan.sources
    return torch.where(plan.sources < choices * tokens, plan.sources % tokens, tokens)


def _wide(values: Tensor) -> torch.dtype:
    """In what sums over these are kept."""
    return torch.promote_types(values.dtype, torch.float32)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        return _pick(tokens, _tokens_of(plan), plan.full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan: Dispatch = ctx.plan
        first, *others = (_pick(grads[0], rows, plan.full) for rows in plan.rows)
        if others:
            total = first.to(_wide(first))
            for other in others:
                total += other
            first = total.to(first.dtype)
        return first, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        total = torch.zeros(plan.rows.shape[1], rows.shape[1], device=rows.device, dtype=_wide(rows))
        for places, weight in zip(plan.rows, weights.to(_wide(rows)), strict=True):
            total.addcmul_(_pick(rows, places, plan.full), weight.unsqueeze(1))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        plan: Dispatch = ctx.plan
        rows, weights = ctx.saved_tensors
        to_rows = to_weights = None
        if ctx.needs_input_grad[0]:
            scale = _pick(weights.reshape(-1), plan.sources, plan.full)
            to_rows = _pick(grads[0], _tokens_of(plan), plan.full).mul_(scale.unsqueeze(1))
        if ctx.needs_input_grad[1]:
            grad = grads[0].to(_wide(rows))
            dots = [(_pick(rows, places, plan.full) * grad).sum(1) for places in plan.rows]
            to_weights = torch.stack(dots).to(weights.dtype)
        return to_rows, to_weights, None
