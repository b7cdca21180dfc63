"""Rows to the ranks that hold their experts, and back: all-to-all that autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.comm.agreement import gather_words
from deepspeed.moe.two_hops import TwoHops
from deepspeed.parallel import AxisGroup

__all__ = ["exchange", "exchange_counts", "most_of_all"]

Splits = list[int] | None


def exchange(
    rows: Tensor,
    axis: AxisGroup,
    comes: Splits = None,
    goes: Splits = None,
    beside: Callable[[], None] | None = None,
) -> Tensor:
    """Send a part of the rows to each rank of the axis: equal parts, or as `goes` and `comes` say.

    `beside` is done while they travel, and its backward while the gradients do.
    """
    if axis.size == 1:
        if beside is not None:
            beside()
        return rows
    trip = _Trip(axis, comes, goes)
    sent: Tensor = _Leave.apply(rows, trip)  # type: ignore[no-untyped-call]
    if beside is not None:
        beside()
    received: Tensor = _Arrive.apply(sent, trip)  # type: ignore[no-untyped-call]
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


class _Trip:
    """One exchange and its way back; what is on the way is not to be touched."""

    def __init__(self, axis: AxisGroup, comes: Splits, goes: Splits) -> None:
        self._axis, self._comes, self._goes = axis, comes, goes
        self._work: Any = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._hops: TwoHops | None = None
        self._turns = False
        """What is on the way goes back."""

    def leave(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Send; what is returned has the shape of what will have arrived."""
        comes, goes = (self._goes, self._comes) if back else (self._comes, self._goes)
        self._sent, self._turns = rows.contiguous(), back
        if self._axis.nodes is not None:
            if self._hops is None:
                self._hops = self._plan(self._axis.nodes, rows)
            self._received, self._work = (self._hops.back if back else self._hops.out)(self._sent)
            return rows.new_empty(len(rows) if comes is None else sum(comes), *rows.shape[1:])
        received = rows.new_empty(len(rows) if comes is None else sum(comes), *rows.shape[1:])
        with comm.labelled("tokens to their experts"):
            self._work = comm.all_to_all_single(
                received, self._sent, comes, goes, group=self._axis.group, async_op=True
            )
        self._received = received
        return received

    def _plan(self, nodes: tuple[AxisGroup, AxisGroup], rows: Tensor) -> TwoHops:
        size = self._axis.size
        if self._comes is None or self._goes is None:
            each = [len(rows) // size] * size
            return TwoHops.plan(nodes, each, each, rows, equal=True)
        return TwoHops.plan(nodes, self._comes, self._goes, rows, equal=False)

    def arrive(self) -> Tensor:
        """What came, once it is here."""
        if self._work is not None:
            self._work.wait()
        received = self._received
        assert received is not None, "nothing is on the way"
        if self._hops is not None and self._turns:
            received = self._hops.through(received)
        self._work = self._sent = self._received = None
        return received


class _Leave(torch.autograd.Function):
    """Rows leave; in backward their gradients arrive, which have left when `_Arrive` was passed backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.leave(rows)
        return rows.view_as(rows)  # in the shape of the gradients that come back

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.arrive(), None  # what comes as the gradient is of its shape only


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.arrive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.leave(grads[0], back=True), None
