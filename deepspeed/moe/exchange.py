"""Rows to the ranks that hold their experts, and back: all-to-all that autograd knows, in one hop or in two.

[Note: two hops] Of N nodes with L ranks each, a rank would send N · L − L messages to other nodes. If it first hands
the rows for place j of any node to its neighbour at place j, each rank sends N − 1 messages, L times as large, and the
same bytes. On the way back the hops come in the other order, so that what is slow, the hop between nodes, is always the
one beside which something else can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.comm.agreement import gather_words
from deepspeed.moe.routing import Routes
from deepspeed.ops.grouped import Groups
from deepspeed.ops.model.assignments import RowAssignment
from deepspeed.ops.registry import op
from deepspeed.parallel import AxisGroup


def to_rows(tokens: Tensor, places: RowAssignment) -> Tensor:
    """[count, M] of [S, M]; empty rows are 0."""
    moved: Tensor = _ToRows.apply(tokens, places)  # type: ignore[no-untyped-call]
    return moved


def combine(rows: Tensor, weights: Tensor, places: RowAssignment) -> Tensor:
    """[S, M] of [count, M]: each token's rows, weighted [k, S] and summed in float32."""
    summed: Tensor = _Combine.apply(rows, weights, places)  # type: ignore[no-untyped-call]
    return summed


def by_slots(routes: Routes, capacity: int) -> RowAssignment:
    """Every expert has `capacity` rows, filled from the front."""
    count = routes.num_experts * capacity
    rows = torch.where(routes.kept, routes.experts * capacity + routes.places, count)
    return RowAssignment(rows.contiguous(), count, full=False)


def in_order(experts: Tensor, count: int) -> tuple[RowAssignment, Groups]:
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
    places = RowAssignment(rows.view(experts.shape), flat.numel(), full=True, sorted=sources)
    return places, Groups(count, ends=ends)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: RowAssignment) -> Tensor:
        ctx.places = places
        rows: Tensor = op("spread_rows")(tokens, places)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return op("combine_rows")(grads[0], None, ctx.places), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: RowAssignment) -> Tensor:
        ctx.places = places
        ctx.save_for_backward(rows, weights)
        tokens: Tensor = op("combine_rows")(rows, weights, places)
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = op("combine_slopes")(grads[0], rows, weights, ctx.places, ctx.needs_input_grad[:2])
        return of_rows, of_weights, None


Counts = NDArray[np.int64]
"""[node, place] rows."""


def swapped(rows: Tensor, counts: Counts) -> Tensor:
    """Rows that lie in blocks [a, b] of `counts` rows each, in the order [b, a]."""
    outer, inner = counts.shape
    sizes: list[int] = counts.reshape(-1).tolist()
    if len(set(sizes)) == 1:
        return rows.view(outer, inner, sizes[0], *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    pieces = rows.split(sizes)
    return torch.cat([pieces[a * inner + b] for b in range(inner) for a in range(outer)])


@dataclass(frozen=True, slots=True)
class TwoHops:
    """One exchange, and its way back: how many rows go where on each hop."""

    inter: AxisGroup
    intra: AxisGroup
    goes: Counts  # [node, place]: rows for each rank
    passing: Counts  # [place, node]: rows that each neighbour hands to this rank, for its place on each node
    comes: Counts  # [node, place]: rows from each rank

    @classmethod
    def plan(
        cls, nodes: tuple[AxisGroup, AxisGroup], comes: Sequence[int], goes: Sequence[int], like: Tensor, equal: bool
    ) -> TwoHops:
        """With unequal numbers neighbours tell each other theirs, for which the host waits."""
        inter, intra = nodes
        outward, inward = (np.array(each).reshape(-1, intra.size) for each in (goes, comes))
        if equal:
            return cls(inter, intra, outward, outward.T, inward)
        told = torch.tensor(outward, device=like.device).t().contiguous()  # [place, node]
        heard = torch.empty_like(told)
        with comm.labelled("numbers of tokens that pass"):
            comm.all_to_all_single(heard, told, group=intra.group)
        return cls(inter, intra, outward, heard.cpu().numpy(), inward)

    def out(self, rows: Tensor) -> tuple[Tensor, Any]:
        """(what will be filled, the work on the way to it)."""
        by_place = swapped(rows, self.goes)
        passing = rows.new_empty(int(self.passing.sum()), *rows.shape[1:])
        _send(by_place, passing, self.intra, self.passing.sum(1).tolist(), self.goes.sum(0).tolist()).wait()
        by_node = swapped(passing, self.passing)
        received = rows.new_empty(int(self.comes.sum()), *rows.shape[1:])
        return received, _send(by_node, received, self.inter, self.comes.sum(1).tolist(), self.passing.sum(0).tolist())

    def back(self, rows: Tensor) -> tuple[Tensor, Any]:
        """The first hop of the way back, as `out`; `through` is the second."""
        received = rows.new_empty(int(self.passing.sum()), *rows.shape[1:])
        return received, _send(rows, received, self.inter, self.passing.sum(0).tolist(), self.comes.sum(1).tolist())

    def through(self, by_node: Tensor) -> Tensor:
        """What came from other nodes, to the neighbours that it belongs to: rows as they were before `out`."""
        passing = swapped(by_node, self.passing.T)
        by_place = by_node.new_empty(int(self.goes.sum()), *by_node.shape[1:])
        _send(passing, by_place, self.intra, self.goes.sum(0).tolist(), self.passing.sum(1).tolist()).wait()
        return swapped(by_place, self.goes.T)


Splits = list[int] | None


def _send(rows: Tensor, received: Tensor, axis: AxisGroup, comes: Splits, goes: Splits) -> Any:
    with comm.labelled("tokens to their experts"):
        return comm.all_to_all_single(received, rows.contiguous(), comes, goes, group=axis.group, async_op=True)


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
        self._turns = False  # what is on the way goes back

    def leave(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Send; what is returned has the shape of what will have arrived."""
        comes, goes = (self._goes, self._comes) if back else (self._comes, self._goes)
        self._sent, self._turns = rows.contiguous(), back
        shaped = rows.new_empty(len(rows) if comes is None else sum(comes), *rows.shape[1:])
        if self._axis.nodes is None:
            self._received, self._work = shaped, _send(self._sent, shaped, self._axis, comes, goes)
        else:
            if self._hops is None:
                self._hops = self._plan(self._axis.nodes, rows)
            self._received, self._work = (self._hops.back if back else self._hops.out)(self._sent)
        return shaped

    def _plan(self, nodes: tuple[AxisGroup, AxisGroup], rows: Tensor) -> TwoHops:
        size = self._axis.size
        if self._comes is None or self._goes is None:
            each = [len(rows) // size] * size
            return TwoHops.plan(nodes, each, each, rows, equal=True)
        return TwoHops.plan(nodes, self._comes, self._goes, rows, equal=False)

    def arrive(self) -> Tensor:
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
    places, groups = in_order(experts, count)
    rows = to_rows(tokens, places)
    if axis is None or axis.size == 1:
        if beside is not None:
            beside()
        return combine(compute(rows, groups), weights, places)
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
    return combine(rows, weights, places)
