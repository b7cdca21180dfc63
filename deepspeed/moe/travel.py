"""Tokens through experts that take as many rows as they were chosen for, on whichever rank they are, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.moe.dispatch import in_order
from deepspeed.moe.exchange import exchange, exchange_counts
from deepspeed.ops.grouped import Groups

if TYPE_CHECKING:
    from deepspeed.parallel import AxisGroup

__all__ = ["Compute", "through_experts"]

Compute = Callable[[Tensor, Groups], Tensor]
"""[rows, M] → [rows, out]: each of this rank's experts computes its group of rows."""


def through_experts(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    count: int,
    axis: AxisGroup | None,
    compute: Compute,
    beside: Callable[[], None] | None = None,
) -> Tensor:
    """[S, out] of tokens [S, M]: what the chosen experts [k, S] compute, weighted [k, S] and summed.

    `count` experts are spread over the axis in order; with several ranks the host has to know how many rows travel.
    `beside` is done once, while they do.
    """
    plan, groups = in_order(experts, count)
    rows = plan.to_rows(tokens)
    if axis is None or axis.size == 1:
        if beside is not None:
            beside()
        return plan.combine(compute(rows, groups), weights)
    local = count // axis.size
    sent = groups.counts().view(axis.size, local)
    came = exchange_counts(sent, axis)
    comes, goes = (each.sum(1).tolist() for each in (came, sent))
    rows = exchange(rows, axis, comes, goes, beside)  # [from rank][local expert]
    numbers = torch.arange(local, device=rows.device).repeat(axis.size)
    order = torch.argsort(numbers.repeat_interleave(came.view(-1), output_size=sum(comes)), stable=True)
    out = compute(rows.index_select(0, order), Groups.of(came.sum(0)))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = exchange(out.index_select(0, back), axis, goes, comes)
    return plan.combine(rows, weights)
