"""Rows to the ranks that hold their experts, and back: all-to-all that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.comm.agreement import gather_words
from deepspeed.parallel import AxisGroup

__all__ = ["exchange", "exchange_counts", "most_of_all"]

Splits = list[int] | None


def exchange(rows: Tensor, axis: AxisGroup, comes: Splits = None, goes: Splits = None) -> Tensor:
    """Send a part of the rows to each rank of the axis: equal parts, or as `goes` and `comes` say."""
    if axis.size == 1:
        return rows
    received: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, axis, comes, goes
    )
    return received


def exchange_counts(counts: Tensor, axis: AxisGroup) -> Tensor:
    """[ranks, local experts]: how many rows each rank sends here, of [ranks, local experts] that this one sends."""
    if axis.size == 1:
        return counts
    received = torch.empty_like(counts)
    with comm.labelled("numbers of tokens per expert"):
        comm.all_to_all_single(received, counts.contiguous(), group=axis.group)
    return received


def most_of_all(number: int, hosts: ProcessGroup | None) -> int:
    """The largest number that a rank has; hosts tell each other, devices go on. None: there is nobody to ask."""
    if hosts is None or dist.get_backend(hosts) == "fake":
        return number
    with comm.labelled("capacity of experts"):
        return int(gather_words(torch.tensor([number]), hosts).max())


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: AxisGroup, comes: Splits, goes: Splits) -> Tensor:
        ctx.axis, ctx.comes, ctx.goes = axis, comes, goes
        return _send(rows, axis, comes, goes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grads[0], ctx.axis, ctx.goes, ctx.comes), None, None, None


def _send(rows: Tensor, axis: AxisGroup, comes: Splits, goes: Splits) -> Tensor:
    received = rows.new_empty(len(rows) if comes is None else sum(comes), *rows.shape[1:])
    with comm.labelled("tokens to their experts"):
        comm.all_to_all_single(received, rows.contiguous(), comes, goes, group=axis.group)
    return received
