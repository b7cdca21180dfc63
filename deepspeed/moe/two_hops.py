"""Rows between ranks on several nodes in two hops: within a node, then between the same places of nodes.

[Note: two hops] Of N nodes with L ranks each, a rank would send N · L − L messages to other nodes. If it first hands
the rows for place j of any node to its neighbour at place j, each rank sends N − 1 messages, L times as large, and the
same bytes. On the way back the hops come in the other order, so that what is slow, the hop between nodes, is always the
one beside which something else can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel import AxisGroup

__all__ = ["TwoHops", "swapped"]

Counts = list[list[int]]
"""[node][place] rows."""


def swapped(rows: Tensor, counts: Counts) -> Tensor:
    """Rows that lie in blocks [a][b] of `counts` rows each, in the order [b][a]."""
    outer, inner = len(counts), len(counts[0])
    numbers = {count for row in counts for count in row}
    if len(numbers) == 1:
        each = numbers.pop()
        return rows.view(outer, inner, each, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    pieces = rows.split([count for row in counts for count in row])
    return torch.cat([pieces[a * inner + b] for b in range(inner) for a in range(outer)])


@dataclass(frozen=True, slots=True)
class TwoHops:
    """One exchange, and its way back: how many rows go where on each hop."""

    inter: AxisGroup
    intra: AxisGroup
    goes: Counts
    """[node][place]: rows for each rank."""
    passing: Counts
    """[place][node]: rows that each neighbour hands to this rank, for its place on each node."""
    comes: Counts
    """[node][place]: rows from each rank."""

    @classmethod
    def plan(
        cls, nodes: tuple[AxisGroup, AxisGroup], comes: Sequence[int], goes: Sequence[int], like: Tensor, equal: bool
    ) -> TwoHops:
        """With unequal numbers neighbours tell each other theirs, for which the host waits."""
        inter, intra = nodes
        outward, inward = _by_node(goes, intra.size), _by_node(comes, intra.size)
        if equal:
            return cls(inter, intra, outward, [list(column) for column in zip(*outward, strict=True)], inward)
        told = torch.tensor(outward, device=like.device).t().contiguous()  # [place, node]
        heard = torch.empty_like(told)
        with comm.labelled("numbers of tokens that pass"):
            comm.all_to_all_single(heard, told, group=intra.group)
        return cls(inter, intra, outward, heard.tolist(), inward)

    def out(self, rows: Tensor) -> tuple[Tensor, Any]:
        """(what will be filled, the work on the way to it)."""
        by_place = swapped(rows, self.goes)
        passing = rows.new_empty(_total(self.passing), *rows.shape[1:])
        _send(by_place, passing, self.intra, _sums(self.passing), _sums(_turned(self.goes))).wait()
        by_node = swapped(passing, self.passing)
        received = rows.new_empty(_total(self.comes), *rows.shape[1:])
        return received, _send(by_node, received, self.inter, _sums(self.comes), _sums(_turned(self.passing)))

    def back(self, rows: Tensor) -> tuple[Tensor, Any]:
        """The first hop of the way back, as `out`; `through` is the second."""
        received = rows.new_empty(_total(self.passing), *rows.shape[1:])
        return received, _send(rows, received, self.inter, _sums(_turned(self.passing)), _sums(self.comes))

    def through(self, by_node: Tensor) -> Tensor:
        """What came from other nodes, to the neighbours that it belongs to: rows as they were before `out`."""
        passing = swapped(by_node, _turned(self.passing))
        by_place = by_node.new_empty(_total(self.goes), *by_node.shape[1:])
        _send(passing, by_place, self.intra, _sums(_turned(self.goes)), _sums(self.passing)).wait()
        return swapped(by_place, _turned(self.goes))


def _send(rows: Tensor, received: Tensor, axis: AxisGroup, comes: list[int], goes: list[int]) -> Any:
    with comm.labelled("tokens to their experts"):
        return comm.all_to_all_single(received, rows.contiguous(), comes, goes, group=axis.group, async_op=True)


def _by_node(counts: Sequence[int], places: int) -> Counts:
    return [list(counts[start : start + places]) for start in range(0, len(counts), places)]


def _turned(counts: Counts) -> Counts:
    return [list(column) for column in zip(*counts, strict=True)]


def _sums(counts: Counts) -> list[int]:
    return [sum(row) for row in counts]


def _total(counts: Counts) -> int:
    return sum(_sums(counts))
