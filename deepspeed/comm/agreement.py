"""A few numbers from every rank, on the hosts, in a few rounds of messages: what ranks agree by.

A backend's own all-gather or all-reduce of host tensors is a ring: as many hops one after the other as there are ranks.
Here the messages of one round go out side by side, and after each round a rank knows `RADIX` times as many numbers, so
that 1,024 ranks need 5 rounds and 16,384 need 7. A `FEW` ranks tell one of them, which tells all: that takes two
rounds, but two messages for each rank where all would send to all, and such ranks often share cores. Who comes last
does best to be that one: it does not wait.
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

_EARLY = 1 << 16  # added to tags of agreements for which somebody may listen early: any others may come in between
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


class WordCollector(NamedTuple):
    """Who tells a few ranks what all said: best the one that comes last."""

    place: int = -1
    """In the group."""
    early: bool = False
    """Whether it may have listened before; the same on all ranks."""
    ears: EarlyReceives | None = None
    """What it heard then."""


LAST = WordCollector()


class EarlyReceives:
    """The receives of the one that tells, begun before it has anything to say itself: what came is there by then."""

    __slots__ = ("rows", "works")

    def __init__(self, group: Any, count: int) -> None:
        """Of `count` words of each other rank."""
        self.rows = torch.empty(group.size(), count, dtype=torch.int64)
        others = (rank for rank in range(group.size()) if rank != group.rank())
        self.works = [group.recv([self.rows[rank]], rank, _TAGS + _EARLY) for rank in others]


class _Few:
    """All tell one rank, which tells all when it waits."""

    def __init__(self, words: Tensor, group: Any, teller: WordCollector) -> None:
        self._group, place = group, teller.place % group.size()
        self._tells = group.rank() == place
        self._others = [rank for rank in range(group.size()) if rank != place]
        self._tag = _TAGS + (_EARLY if teller.early else 0)
        self._rows = teller.ears.rows if teller.ears is not None else words.new_empty(group.size(), words.numel())
        if self._tells:
            self._rows[place] = words
            works = [] if teller.ears is None else teller.ears.works
            works = works or [group.recv([self._rows[rank]], rank, self._tag) for rank in self._others]
        else:
            works = [group.recv([self._rows], place, self._tag + 1), group.send([words], place, self._tag)]
        self._works = AllOf(works, DEFAULT.limit)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._works.wait(timeout)
        if self._tells:
            self._tells = False
            telling = [self._group.send([self._rows], rank, self._tag + 1) for rank in self._others]
            AllOf(telling, DEFAULT.limit).wait(timeout)
        return True

    def is_completed(self) -> bool:
        return not self._tells and self._works.is_completed()

    def found(self) -> Tensor:
        """The numbers of all ranks, in their order."""
        return self._rows


class _Many:
    """The messages of the first round are under way; those of the others are sent by `wait`."""

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


_Gathering = _Few | _Many


def _gather(
    kept: list[_Gathering], words: Tensor, group: Any, teller: WordCollector, async_op: bool
) -> _Gathering | None:
    """Begin, and wait unless `async_op`; who knows what was found is `kept`."""
    gathering = _Few(words, group, teller) if _are_few(group.size()) else _Many(words, group)
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
    """Begin to receive `count` words of each other rank for a `WordCollector` here; None if that gains nothing."""
    real: Any = td.group.WORLD if group is None else group
    return EarlyReceives(real, count) if _are_few(real.size()) and real.rank() == place % real.size() else None


def gather_words(words: Tensor, group: Any = None, *, teller: WordCollector = LAST) -> Tensor:
    """[ranks, words]: the int64 `words` of every rank, in the order of the ranks; all ranks of the group call it."""
    return _begin(words, group, teller, False).wait()


def begin_to_gather_words(words: Tensor, group: Any = None) -> Pending[Tensor]:
    """As `gather_words`, without waiting yet; until all have waited ranks gather nothing else in this group."""
    return _begin(words, group, LAST, True)


def _begin(words: Tensor, group: Any, teller: WordCollector, async_op: bool) -> Pending[Tensor]:
    real: Any = td.group.WORLD if group is None else group
    if real.size() == 1:
        return Pending(words.clone()[None])
    kept: list[_Gathering] = []
    work = _run(_GATHER, (kept, words, real, teller, async_op), words, group, async_op, _LOG)
    return Pending(words, work, lambda _: kept[0].found())


def unite(mask: Tensor, group: Any = None) -> Tensor:
    """The union over the ranks of a group of what each marked in its uint8 `mask`, which becomes that."""
    real: Any = td.group.WORLD if group is None else group
    if real.size() > 1:
        _run(_UNITE, (mask, real), mask, group, False, (False, "unite", None))
    return mask
