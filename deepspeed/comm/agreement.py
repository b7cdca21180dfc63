"""Gathers a few numbers from every rank, between hosts, in a few rounds of messages: how ranks agree.

A backend's own all-gather or all-reduce of host tensors is a ring with one hop per rank. Here the messages of a round
go out concurrently, and each round multiplies what a rank knows by `RADIX`. Up to `FEW` ranks send to one of them, the
collector, which answers all: two rounds with few messages, since such ranks often share cores. The rank that arrives
last should collect, because it does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as td
from torch import Tensor

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import CommOperation
from deepspeed.comm.pending import AllOf, Pending

RADIX = 4
FEW = 8
_TAGS = 1 << 20  # from here on: a group may carry messages of others, with their tags

Message = tuple[int, int]
"""(distance, rows): the rank that is so far behind gets the first so many rows, the one ahead sends as many."""

_EARLY = 1 << 16  # added to tags of agreements whose receives may begin early: any others may come in between
_run = DEFAULT.run
_LOG = (False, "gather_words", None)


def schedule(size: int) -> Iterator[list[Message]]:
    """The messages of each round: after it, a rank knows the numbers of so many ranks from itself on."""
    known = 1
    while known < size:
        yield [(step * known, min(known, size - step * known)) for step in range(1, RADIX) if step * known < size]
        known = min(known * RADIX, size)


def rounds(size: int) -> int:
    """Rounds of messages that an agreement of so many ranks takes, one after the other."""
    return 2 if _are_few(size) else sum(1 for _ in schedule(size))


def _are_few(size: int) -> bool:
    """Two ranks send a message each at once."""
    return 2 < size <= FEW


class Collector(NamedTuple):
    """Which of a few ranks collects the numbers of all and sends them back."""

    place: int = -1
    """In the group."""
    early: bool = False
    """Whether it may have begun to receive before; the same on all ranks."""
    received: EarlyReceives | None = None
    """What it has received by then."""


LAST = Collector()


class EarlyReceives:
    """The collector's receives, begun before it has numbers of its own."""

    __slots__ = ("rows", "works")

    def __init__(self, group: Any, count: int) -> None:
        """Of `count` words of each other rank."""
        self.rows = torch.empty(group.size(), count, dtype=torch.int64)
        others = (rank for rank in range(group.size()) if rank != group.rank())
        self.works = [group.recv([self.rows[rank]], rank, _TAGS + _EARLY) for rank in others]


class _AtOneRank:
    """All send to the collector, which answers when it waits."""

    def __init__(self, words: Tensor, group: Any, collector: Collector) -> None:
        self._group, place, received = group, collector.place % group.size(), collector.received
        self._collects = group.rank() == place
        self._others = [rank for rank in range(group.size()) if rank != place]
        self._tag = _TAGS + (_EARLY if collector.early else 0)
        self._rows = words.new_empty(group.size(), words.numel()) if received is None else received.rows
        if self._collects:
            self._rows[place] = words
            works = [] if received is None else received.works
            works = works or [group.recv([self._rows[rank]], rank, self._tag) for rank in self._others]
        else:
            works = [group.recv([self._rows], place, self._tag + 1), group.send([words], place, self._tag)]
        self._works = AllOf(works, DEFAULT.limit)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._works.wait(timeout)
        if self._collects:
            self._collects = False
            answers = [self._group.send([self._rows], rank, self._tag + 1) for rank in self._others]
            AllOf(answers, DEFAULT.limit).wait(timeout)
        return True

    def is_completed(self) -> bool:
        return not self._collects and self._works.is_completed()

    def found(self) -> Tensor:
        """The numbers of all ranks, in their order."""
        return self._rows


class _InRounds:
    """The messages of the first round are under way; `wait` sends those of the others."""

    def __init__(self, words: Tensor, group: Any) -> None:
        self._rows = words.new_empty(group.size(), words.numel())  # from this rank on
        self._rows[0] = words
        self._group = group
        self._rounds = list(schedule(group.size()))
        self._works = self._begin(0)

    def _begin(self, number: int) -> AllOf:
        size, rank, rows, works = self._group.size(), self._group.rank(), self._rows, []
        for place, (distance, count) in enumerate(self._rounds[number]):
            tag = _TAGS + number * RADIX + place
            works.append(self._group.recv([rows[distance : distance + count]], (rank + distance) % size, tag))
            works.append(self._group.send([rows[:count]], (rank - distance) % size, tag))
        return AllOf(works, DEFAULT.limit)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._works.wait(timeout)
        for number in range(1, len(self._rounds)):
            self._begin(number).wait(timeout)
        return True

    def is_completed(self) -> bool:
        return len(self._rounds) == 1 and self._works.is_completed()

    def found(self) -> Tensor:
        """The numbers of all ranks, in their order."""
        return self._rows.roll(self._group.rank(), 0)


_Gathering = _AtOneRank | _InRounds


def _gather(
    kept: list[_Gathering], words: Tensor, group: Any, collector: Collector, async_op: bool
) -> _Gathering | None:
    """Begin, and wait unless `async_op`; the object that has the result goes into `kept`."""
    gathering = _AtOneRank(words, group, collector) if _are_few(group.size()) else _InRounds(words, group)
    kept.append(gathering)
    if async_op:
        return gathering
    gathering.wait()
    return None


def _unite(mask: Tensor, group: Any) -> None:
    size, rank, distance = group.size(), group.rank(), 1
    other = torch.empty_like(mask)
    while distance < size:
        receiving = group.recv([other], (rank + distance) % size, _TAGS + distance)
        sending = group.send([mask], (rank - distance) % size, _TAGS + distance)
        AllOf((receiving, sending), DEFAULT.limit).wait()
        mask |= other
        distance *= 2


_GATHER = CommOperation("gather_words", _gather)
_UNITE = CommOperation("unite", _unite)


def receive_early(count: int, group: Any = None, *, place: int = 0) -> EarlyReceives | None:
    """Begin to receive `count` words of each other rank for a `Collector` here; None if that gains nothing."""
    real: Any = td.group.WORLD if group is None else group
    return EarlyReceives(real, count) if _are_few(real.size()) and real.rank() == place % real.size() else None


def gather_words(words: Tensor, group: Any = None, *, collector: Collector = LAST) -> Tensor:
    """[ranks, words]: the int64 `words` of every rank, in the order of the ranks; all ranks of the group call it."""
    return _begin(words, group, collector, False).wait()


def begin_to_gather_words(words: Tensor, group: Any = None) -> Pending[Tensor]:
    """As `gather_words`, without waiting yet; until all have waited ranks gather nothing else in this group."""
    return _begin(words, group, LAST, True)


def _begin(words: Tensor, group: Any, collector: Collector, async_op: bool) -> Pending[Tensor]:
    real: Any = td.group.WORLD if group is None else group
    if real.size() == 1:
        return Pending(words.clone()[None])
    kept: list[_Gathering] = []
    work = _run(_GATHER, (kept, words, real, collector, async_op), words, group, async_op, _LOG)
    return Pending(words, work, lambda _: kept[0].found())


def unite(mask: Tensor, group: Any = None) -> Tensor:
    """Set the uint8 `mask` to the union of what each rank of the group marked in its own."""
    real: Any = td.group.WORLD if group is None else group
    if real.size() > 1:
        _run(_UNITE, (mask, real), mask, group, False, (False, "unite", None))
    return mask
