"""Whole matrices from fragments and back, each computed on one rank: what Muon needs of a sharded parameter.

The plan follows from the layout alone, so that all ranks have the same one and nothing is agreed upon at run time. A
matrix that lies on one rank is computed there. The others travel in rounds: each goes to a rank that holds a part of
it, the least busy one so far, by one all-to-all, and the parts of the results come back by another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import FlatLayout
from deepspeed.ops.muon.update import check_matrix, heads_of
from deepspeed.ops.muon.whole import MatrixRule
from deepspeed.ops.optimizer import wide
from deepspeed.zero.states.group import ShardGroup

__all__ = ["Plan", "Round", "ShardedMatrices", "plan"]

Sized = tuple[int, int]
"""(parameter, elements)."""

# Elements that a rank has whole at once, unless its share of one round, a single matrix, is larger.
_WHOLE_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True)
class Round:
    """Parameters that travel together."""

    owned: tuple[tuple[int, ...], ...]
    """Those that each rank computes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every parameter of a layout is computed."""

    settled: dict[int, int]
    """Parameters that lie on one rank, and that rank."""
    rounds: list[Round]


def plan(layout: FlatLayout, limit: int = _WHOLE_ELEMENTS) -> Plan:
    """The same on all ranks; a round has `limit` elements per rank, or a matrix per rank if that is more."""
    holders = [_holders(layout, param) for param in range(len(layout.numels))]
    settled = {param: ranks[0] for param, ranks in enumerate(holders) if len(ranks) == 1}
    load = [0.0] * layout.world
    for param, rank in settled.items():
        load[rank] += _cost(layout.numels[param])
    rounds = []
    for members in _batches([param for param, ranks in enumerate(holders) if len(ranks) > 1], layout, limit):
        owned: list[list[int]] = [[] for _ in load]
        for param in sorted(members, key=lambda param: (-layout.numels[param], param)):
            owner = min(holders[param], key=lambda rank: (load[rank], rank))
            load[owner] += _cost(layout.numels[param])
            owned[owner].append(param)
        rounds.append(Round(tuple(map(tuple, owned))))
    return Plan(settled, rounds)


def _batches(params: Sequence[int], layout: FlatLayout, limit: int) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for param in params:
        if len(batch) >= layout.world and size >= limit * layout.world:
            yield batch
            batch, size = [], 0
        batch.append(param)
        size += layout.numels[param]
    if batch:
        yield batch


class ShardedMatrices:
    """`deepspeed.ops.muon.Whole` over shard groups; results come round by round.

    `groups` are all groups of the optimizer; parameters that are unfrozen may add some later.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self._groups = groups
        self._plans: dict[ShardGroup, Plan] = {}
        self._origin: dict[Tensor, Tensor] = {}

    def parameter(self, param: Tensor) -> Tensor:
        """The parameter of the model of which the optimizer's `param` is a fragment."""
        if param not in self._origin:
            self._origin = {piece.master: piece.param for group in self._groups for piece in group.pieces}
        return self._origin[param]

    def apply(
        self, group: dict[str, Any], params: Sequence[Tensor], fragments: Sequence[Tensor], rule: MatrixRule
    ) -> Iterator[tuple[int, Tensor]]:
        """See `deepspeed.ops.muon.Whole.apply`."""
        mine = [each for each in self._groups if each.options is group]
        for each in mine:
            _check_all(each, group)
        given = {id(param): (place, fragments[place]) for place, param in enumerate(params)}
        for each in mine:
            if each not in self._plans:
                self._plans[each] = plan(each.layout)
            yield from _Exchange(each, given, rule).run(self._plans[each])


class _Exchange:
    """One step of one group: what this rank holds of each parameter, by the parameter's place in the layout."""

    def __init__(self, group: ShardGroup, given: dict[int, tuple[int, Tensor]], rule: MatrixRule) -> None:
        self._layout, self._me, self._group = group.layout, group.axis.rank, group
        self._rule = rule
        self._dtype, self._device = wide(group.dtypes.master), group.params[0].device
        places = {id(param): place for place, param in enumerate(group.params)}
        self._held: dict[int, tuple[int, Tensor]] = {}
        self._shapes: dict[int, torch.Size] = {}
        for piece in group.pieces:
            if id(piece.master) in given:  # else it has no gradient, on any rank
                self._held[places[id(piece.param)]] = given[id(piece.master)]
                self._shapes[places[id(piece.param)]] = piece.shape

    def run(self, planned: Plan) -> Iterator[tuple[int, Tensor]]:
        """(the optimizer's place, this rank's part of the result) of every fragment."""
        alone = [param for param, rank in planned.settled.items() if rank == self._me and param in self._held]
        results = self._computed({param: self._held[param][1] for param in alone})
        yield from ((self._held[param][0], results[param].reshape(-1)) for param in alone)
        for each in planned.rounds:
            yield from self._round(each)

    def _round(self, each: Round) -> Iterator[tuple[int, Tensor]]:
        me = self._me
        # what this rank holds of each owner's parameters, and what every rank holds of this one's parameters
        out = [[(param, self._size(param, me)) for param in theirs] for theirs in each.owned]
        back = [[(param, self._size(param, rank)) for param in each.owned[me]] for rank in range(len(each.owned))]
        sent = self._all_to_all([self._part(param, size) for parts in out for param, size in parts], out, back)
        pieces: dict[int, list[Tensor]] = {param: [] for param in each.owned[me]}
        for (param, _), part in zip((item for parts in back for item in parts), sent, strict=True):
            pieces[param].append(part)
        results = self._computed({param: torch.cat(pieces[param]) for param in pieces if param in self._held})
        answers = []
        for rank, parts in enumerate(back):
            for param, size in parts:
                start = self._layout.interval(param, rank)[0]
                whole = results.get(param)
                answers.append(self._zeros(size) if whole is None else whole.reshape(-1)[start : start + size])
        returned = self._all_to_all(answers, back, out)
        for (param, size), part in zip((item for parts in out for item in parts), returned, strict=True):
            if size and param in self._held:
                yield self._held[param][0], part

    def _all_to_all(
        self, parts: Sequence[Tensor], to: Sequence[Sequence[Sized]], of: Sequence[Sequence[Sized]]
    ) -> Sequence[Tensor]:
        """Send `parts`, laid out as `to`; what comes is laid out as `of`."""
        sends = [sum(size for _, size in sized) for sized in to]
        comes = [sum(size for _, size in sized) for sized in of]
        sending = torch.cat(list(parts)) if parts else self._zeros(0)
        coming = torch.empty(sum(comes), dtype=self._dtype, device=self._device)
        with comm.labelled("matrices of Muon"):
            comm.all_to_all_single(coming, sending, comes, sends, group=self._group.axis.group)
        parts_come: tuple[Tensor, ...] = coming.split([size for sized in of for _, size in sized])
        return parts_come

    def _computed(self, flat: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if not flat:
            return {}
        wholes = [whole.view(self._shapes[param]) for param, whole in flat.items()]
        results = self._rule([self._held[param][0] for param in flat], wholes)
        return dict(zip(flat, results, strict=True))

    def _size(self, param: int, rank: int) -> int:
        start, stop = self._layout.interval(param, rank)
        return stop - start

    def _part(self, param: int, size: int) -> Tensor:
        return self._held[param][1] if param in self._held else self._zeros(size)

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def _check_all(shards: ShardGroup, group: dict[str, Any]) -> None:
    """Refuse on every rank what one of them would refuse in the middle of an exchange."""
    for name, param in zip(shards.names, shards.params, strict=True):
        try:
            check_matrix(tuple(getattr(param, "ds_shape", param.shape)), num_heads=heads_of(group, param))
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error


def _holders(layout: FlatLayout, param: int) -> list[int]:
    intervals = (layout.interval(param, rank) for rank in range(layout.world))
    return [rank for rank, (start, stop) in enumerate(intervals) if start < stop]


def _cost(numel: int) -> float:
    """Of a matrix m × n it is m·m·n; squares are the usual guess where only the product is known."""
    return numel * math.sqrt(numel)
