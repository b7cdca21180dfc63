"""Whole matrices from fragments and back, each computed on one rank: what Muon needs of a sharded parameter.

The plan follows from the layout alone, the same on all ranks. A matrix that lies on one rank is computed there. The
others travel in rounds: each goes by one all-to-all to the least busy rank that holds a part of it, and the parts of
the results come back by another. A round does not look at ranks one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import FlatLayout
from deepspeed.ops.moments import wide
from deepspeed.ops.muon.muon import MatrixRule, check_matrix, heads_of
from deepspeed.zero.states.groups import ShardGroup

# Elements that a rank has whole at once, unless its share of one round, a single matrix, is larger.
_WHOLE_ELEMENTS = 2**25


MatrixRound = dict[int, tuple[int, ...]]
"""Parameters that travel together, by the rank that computes them, in the order of the ranks that compute any."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Where every parameter of a layout is computed."""

    settled: dict[int, int]
    """Parameters that lie on one rank, and that rank."""
    rounds: list[MatrixRound]


def plan(layout: FlatLayout, limit: int = _WHOLE_ELEMENTS) -> MatrixPlan:
    """The same on all ranks; a round has `limit` elements per rank, or a matrix per rank if that is more."""
    holders = [layout.holders(param) for param in range(len(layout.numels))]
    settled = {param: ranks[0] for param, ranks in enumerate(holders) if len(ranks) == 1}
    loads = np.zeros(layout.world)
    for param, rank in settled.items():
        loads[rank] += _cost(layout.numels[param])
    rounds = []
    for members in _batches([param for param, ranks in enumerate(holders) if len(ranks) > 1], layout, limit):
        owned: dict[int, list[int]] = {}
        for param in sorted(members, key=lambda param: (-layout.numels[param], param)):
            ranks = holders[param]
            owner = ranks.start + int(loads[ranks.start : ranks.stop].argmin())
            loads[owner] += _cost(layout.numels[param])
            owned.setdefault(owner, []).append(param)
        rounds.append({owner: tuple(owned[owner]) for owner in sorted(owned)})
    return MatrixPlan(settled, rounds)


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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring ranks that hold equally much of each of some parameters."""

    ranks: range
    sizes: tuple[int, ...]
    """Elements of each parameter on one rank."""


def stretches(layout: FlatLayout, params: Sequence[int]) -> list[Stretch]:
    """All ranks from the first to the last that hold something of `params`, in order."""
    holders = [layout.holders(param) for param in params]
    ends = {end for ranks in holders for end in (ranks.start, ranks.start + 1, ranks.stop - 1, ranks.stop)}
    found = []
    for start, stop in pairwise(sorted(ends)):
        sizes = tuple(_size(layout, param, start) for param in params)
        found.append(Stretch(range(start, stop), sizes))
    return found


class ShardedMatrices:
    """`deepspeed.ops.muon.WholeMatrices` over shard groups; results come round by round.

    `groups` are all groups of the optimizer; parameters that are unfrozen may add some later.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self._groups = groups
        self._plans: dict[ShardGroup, MatrixPlan] = {}
        self._origin: dict[Tensor, Tensor] = {}

    def parameter(self, param: Tensor) -> Tensor:
        """The parameter of the model of which the optimizer's `param` is a fragment."""
        if param not in self._origin:
            self._origin = {piece.master: piece.param for group in self._groups for piece in group.pieces}
        return self._origin[param]

    def apply(
        self, group: dict[str, Any], params: Sequence[Tensor], fragments: Sequence[Tensor], rule: MatrixRule
    ) -> Iterator[tuple[int, Tensor]]:
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

    def run(self, planned: MatrixPlan) -> Iterator[tuple[int, Tensor]]:
        """(the optimizer's place, this rank's part of the result) of every fragment."""
        alone = [param for param, rank in planned.settled.items() if rank == self._me and param in self._held]
        results = self._computed({param: self._held[param][1] for param in alone})
        yield from ((self._held[param][0], results[param].reshape(-1)) for param in alone)
        for each in planned.rounds:
            yield from self._round(each)

    def _round(self, owned: MatrixRound) -> Iterator[tuple[int, Tensor]]:
        world, mine = self._layout.world, owned.get(self._me, ())
        sizes = {param: _size(self._layout, param, self._me) for theirs in owned.values() for param in theirs}
        sends, comes = [0] * world, [0] * world
        for owner, theirs in owned.items():
            sends[owner] = sum(sizes[param] for param in theirs)
        parts = stretches(self._layout, mine)
        for part in parts:
            comes[part.ranks.start : part.ranks.stop] = [sum(part.sizes)] * len(part.ranks)

        out = [self._part(param, size) for param, size in sizes.items()]
        wire = self._all_to_all(torch.cat(out), sends, comes)
        wholes = {param: wire.new_empty(self._layout.numels[param]) for param in mine if param in self._held}
        for param, start, lines in self._lines(wire, mine, parts):
            if param in wholes:
                wholes[param][start : start + lines.numel()].view_as(lines).copy_(lines)
        results = {param: result.reshape(-1) for param, result in self._computed(wholes).items()}
        for param, start, lines in self._lines(wire, mine, parts):
            if param in results:  # of the others zeros came, and go back
                lines.copy_(results[param][start : start + lines.numel()].view_as(lines))
        answers = self._all_to_all(wire, comes, sends).split(list(sizes.values()))
        for (param, size), answer in zip(sizes.items(), answers, strict=True):
            if size and param in self._held:
                yield self._held[param][0], answer

    def _lines(
        self, wire: Tensor, params: Sequence[int], parts: Sequence[Stretch]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(parameter, first element, its lines) of what lies in `wire` as it comes from the ranks, one after the other.

        Lines are [ranks of a stretch, elements of each].
        """
        sizes = [len(part.ranks) * sum(part.sizes) for part in parts]
        for part, block in zip(parts, wire.split(sizes), strict=True):
            rows = block.view(len(part.ranks), sum(part.sizes))
            for param, lines in zip(params, rows.split(part.sizes, dim=1), strict=True):
                yield param, self._layout.interval(param, part.ranks.start)[0], lines

    def _all_to_all(self, sending: Tensor, sends: list[int], comes: list[int]) -> Tensor:
        coming = torch.empty(sum(comes), dtype=self._dtype, device=self._device)
        with comm.labelled("matrices of Muon"):
            comm.all_to_all_single(coming, sending, comes, sends, group=self._group.axis.group)
        return coming

    def _computed(self, flat: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if not flat:
            return {}
        wholes = [whole.view(self._shapes[param]) for param, whole in flat.items()]
        results = self._rule([self._held[param][0] for param in flat], wholes)
        return dict(zip(flat, results, strict=True))

    def _part(self, param: int, size: int) -> Tensor:
        if param in self._held:
            return self._held[param][1]
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def _check_all(shards: ShardGroup, group: dict[str, Any]) -> None:
    """Refuse on every rank what one of them would refuse in the middle of an exchange."""
    for name, param in zip(shards.names, shards.params, strict=True):
        try:
            check_matrix(tuple(getattr(param, "ds_shape", param.shape)), num_heads=heads_of(group, param))
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error


def _size(layout: FlatLayout, param: int, rank: int) -> int:
    start, stop = layout.interval(param, rank)
    return stop - start


def _cost(numel: int) -> float:
    """Of a matrix m × n it is m·m·n; squares are the usual guess where only the product is known."""
    return numel * math.sqrt(numel)
