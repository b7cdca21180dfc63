"""What a pass over the model uses, in order, and the plan made from it: when to gather ahead, what to keep.

The plan is a pure function of the trace and the limits, linear in the trace. Every rank has the same trace, so that
every rank issues the same gathers in the same order without asking.

[Note: blocks] Modules in a list of similar ones are blocks. The parameters of a block are gathered by one operation,
when its first module runs or before. What is gathered ahead is counted beyond the block that is running.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UseEvent:
    """The begin (`enter`) or the end of one use of some parameters."""

    enter: bool
    use: int
    shards: tuple[int, ...]
    block: int = -1
    """The block that the module belongs to; -1 if none."""


@dataclass(frozen=True)
class FetchLimits:
    """In elements of whole parameters."""

    ahead: int
    """Gathered before their block runs."""
    live: int
    """Whole at one time."""
    reuse: int
    """A parameter that is used again within so many elements of others stays whole."""


@dataclass(frozen=True)
class FetchStep:
    """What to do when a use begins."""

    use: int
    drop: tuple[int, ...]
    """Kept parameters that have to make room."""
    start: tuple[tuple[int, ...], ...]
    """To be gathered now, in this order; each batch together."""
    keep: frozenset[int]
    """Not to be released when this use ends."""


@dataclass(frozen=True)
class FetchPlan:
    """The steps of a pass, one per use."""

    steps: tuple[FetchStep, ...]
    peak: int
    """Elements that are whole at most."""
    kept: frozenset[int] = frozenset()
    """Whole when the pass ends, for the pass that follows."""
    _places: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for place, step in enumerate(self.steps):
            self._places.setdefault(step.use, []).append(place)

    def find(self, use: int, begin: int) -> int | None:
        """The first place from `begin` on at which a use stands."""
        places = self._places.get(use, [])
        at = bisect_left(places, begin)
        return places[at] if at < len(places) else None


def plan(
    events: Sequence[UseEvent],
    numel: Mapping[int, int],
    limits: FetchLimits,
    *,
    whole: frozenset[int] = frozenset(),
    returns: bool = False,
) -> FetchPlan:
    """When to gather what, so that as much as allowed is ahead of its use and no more than allowed is whole.

    `whole` are the parameters that are whole when the pass begins. If it `returns`, a backward follows that uses the
    same in reverse, for which parameters are kept too.
    """
    return _Planning(events, numel, limits, whole, returns).run()


class _Uses:
    """Where each parameter is used next, and how many elements lie between."""

    def __init__(self, events: Sequence[UseEvent], numel: Mapping[int, int], returns: bool) -> None:
        following = [UseEvent(True, e.use, e.shards) for e in reversed(events) if e.enter] if returns else []
        self._places: dict[int, list[int]] = {}
        self._passed = [0]
        for place, event in enumerate([*events, *following]):
            size = sum(numel[shard] for shard in event.shards) if event.enter else 0
            self._passed.append(self._passed[-1] + size)
            if event.enter:
                for shard in event.shards:
                    self._places.setdefault(shard, []).append(place)
        self.never = len(self._passed)

    def next(self, shard: int, after: int) -> int:
        """The place of its next use after `after`; `never` if there is none."""
        places = self._places.get(shard, [])
        at = bisect_left(places, after + 1)
        return places[at] if at < len(places) else self.never

    def distance(self, after: int, place: int) -> int:
        """Elements used between two places."""
        return self._passed[place] - self._passed[after + 1]


class _Planning:
    """Walks over a trace once, with what is whole at each event."""

    def __init__(
        self,
        events: Sequence[UseEvent],
        numel: Mapping[int, int],
        limits: FetchLimits,
        whole: frozenset[int],
        returns: bool,
    ) -> None:
        self._events, self._numel, self._limits, self._returns = events, numel, limits, returns
        self._uses = _Uses(events, numel, returns)
        self._runs = _runs(events, numel)
        self._whole = set(whole)
        self._live = sum(numel[shard] for shard in whole)
        self._unused: dict[int, int] = {}  # gathered before its use → the run it was gathered for
        self._waiting: Counter[int] = Counter()  # elements of those, by run
        self._run = -1
        self._ahead = 0  # elements of those in runs that have not begun
        self._holds: Counter[int] = Counter()
        self._idle: list[tuple[int, int]] = [(-self._uses.next(shard, -1), shard) for shard in whole]
        heapq.heapify(self._idle)
        self._cursor = 0
        self._peak = self._live

    def run(self) -> FetchPlan:
        steps: list[FetchStep] = []
        open_at: dict[int, list[int]] = {}
        keeps: dict[int, frozenset[int]] = {}
        for place, event in enumerate(self._events):
            if event.enter:
                open_at.setdefault(event.use, []).append(len(steps))
                steps.append(self._enter(place, event))
            elif open_at.get(event.use):
                keeps[open_at[event.use].pop()] = self._leave(place, event)
        finished = (FetchStep(s.use, s.drop, s.start, keeps.get(i, frozenset())) for i, s in enumerate(steps))
        return FetchPlan(tuple(finished), self._peak, frozenset(self._whole) if self._returns else frozenset())

    def _admit(self, shard: int) -> None:
        self._whole.add(shard)
        self._live += self._numel[shard]
        self._peak = max(self._peak, self._live)

    def _dismiss(self, shard: int, place: int) -> None:
        self._whole.discard(shard)
        self._live -= self._numel[shard]
        self._cursor = min(self._cursor, self._uses.next(shard, place))

    def _enter(self, place: int, event: UseEvent) -> FetchStep:
        if self._runs.of[place] != self._run:
            self._ahead += self._waiting[self._run] if not self._counts(self._run) else 0
            self._run = self._runs.of[place]
            self._ahead -= self._waiting[self._run] if not self._counts(self._run) else 0
        needed = [shard for shard in event.shards if shard not in self._whole]
        drop = self._make_room(place, sum(self._numel[shard] for shard in needed), event)
        for shard in needed:
            self._admit(shard)
        for shard in event.shards:
            self._use(shard)
            self._holds[shard] += 1
        self._cursor = max(self._cursor, place + 1)
        batches = [needed + self._rest_of_run(place)] if needed else []
        batches += self._gather_ahead()
        return FetchStep(event.use, tuple(drop), tuple(tuple(batch) for batch in batches if batch), frozenset())

    def _counts(self, run: int) -> bool:
        """True if what is gathered for a run counts as ahead: not that of the block that runs, if it fits."""
        return run != self._run or self._runs.size[run] > self._limits.ahead

    def _wait(self, shard: int, run: int) -> None:
        self._admit(shard)
        self._unused[shard] = run
        self._waiting[run] += self._numel[shard]
        self._ahead += self._numel[shard] if self._counts(run) else 0

    def _use(self, shard: int) -> None:
        run = self._unused.pop(shard, None)
        if run is not None:
            self._waiting[run] -= self._numel[shard]
            self._ahead -= self._numel[shard] if self._counts(run) else 0

    def _rest_of_run(self, place: int) -> list[int]:
        """What else the block needs that has just begun without having been gathered."""
        run = self._runs.of[place]
        if self._runs.size[run] > self._limits.ahead:
            return []
        start: list[int] = []
        for at in range(place + 1, self._runs.end[run]):
            for shard in self._events[at].shards if self._events[at].enter else ():
                if shard not in self._whole and self._live + self._numel[shard] <= self._limits.live:
                    self._wait(shard, run)
                    start.append(shard)
        return start

    def _gather_ahead(self) -> list[list[int]]:
        """What to gather before its turn; in batches, since many small gathers cost more than one."""
        limit = self._limits.ahead
        if limit <= 0 or (self._ahead and self._ahead * 2 >= limit):
            return []
        start: list[int] = []
        while self._cursor < len(self._events):
            event, run = self._events[self._cursor], self._runs.of[self._cursor]
            if event.enter and self._cuts(run):
                break  # a block that fits is not cut
            if event.enter and not self._take_ahead(event, run, start):
                break
            self._cursor += 1
        return [start]

    def _cuts(self, run: int) -> bool:
        """True if not all of a run that could be ahead as a whole can be now."""
        size = self._runs.size[run]
        room = self._limits.ahead - self._ahead
        return run != self._run and size <= self._limits.ahead and size - self._waiting[run] > room

    def _take_ahead(self, event: UseEvent, run: int, start: list[int]) -> bool:
        for shard in event.shards:
            if shard in self._whole:
                continue
            size = self._numel[shard]
            if self._live + size > self._limits.live or (self._ahead and self._ahead + size > self._limits.ahead):
                return False
            self._wait(shard, run)
            start.append(shard)
        return True

    def _make_room(self, place: int, wanted: int, event: UseEvent) -> list[int]:
        """Drop what is kept for later, the farthest use first, until `wanted` fits."""
        drop: list[int] = []
        spared: list[tuple[int, int]] = []
        while self._idle and self._live + wanted > self._limits.live:
            item = heapq.heappop(self._idle)
            shard = item[1]
            if shard not in self._whole or self._holds[shard] or shard in self._unused:
                continue
            if shard in event.shards:
                spared.append(item)
                continue
            if -item[0] != self._uses.next(shard, place - 1):
                heapq.heappush(self._idle, (-self._uses.next(shard, place - 1), shard))
                continue
            self._dismiss(shard, place)
            drop.append(shard)
        for item in spared:
            heapq.heappush(self._idle, item)
        return drop

    def _leave(self, place: int, event: UseEvent) -> frozenset[int]:
        keep: set[int] = set()
        for shard in event.shards:
            self._holds[shard] -= 1
            if self._holds[shard] > 0 or shard not in self._whole:
                continue
            again = self._uses.next(shard, place)
            if again < self._uses.never and 0 < self._limits.reuse >= self._uses.distance(place, again):
                keep.add(shard)
                heapq.heappush(self._idle, (-again, shard))
            else:
                self._dismiss(shard, place)
        return frozenset(keep)


@dataclass(frozen=True)
class _Runs:
    """Stretches of a trace in which one block runs; a use outside of blocks is a stretch of its own."""

    of: list[int]
    """The stretch of each event."""
    end: list[int]
    """Where each ends."""
    size: list[int]
    """Elements of the parameters that it uses."""


def _runs(events: Sequence[UseEvent], numel: Mapping[int, int]) -> _Runs:
    of: list[int] = []
    end: list[int] = []
    seen: list[set[int]] = []
    last: int | None = None
    for place, event in enumerate(events):
        if not end or (event.enter and (event.block == -1 or event.block != last)):
            end.append(place)
            seen.append(set())
        if event.enter:
            last = event.block
            seen[-1].update(event.shards)
        of.append(len(end) - 1)
        end[-1] = place + 1
    return _Runs(of, end, [sum(numel[shard] for shard in shards) for shards in seen])
