"""What a pass over the model uses, in order, and the plan made from it: when to gather ahead, what to keep.

The plan is a pure function of the trace and the limits. Every rank has the same trace, so every rank issues the same
gathers in the same order without asking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Event", "Limits", "Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Event:
    """The begin (`enter`) or the end of one use of some parameters."""

    enter: bool
    use: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """In elements of whole parameters."""

    ahead: int
    """Gathered before they are used."""
    live: int
    """Whole at one time."""
    reuse: int
    """A parameter that is used again within so many elements of others stays whole."""


@dataclass(frozen=True)
class Step:
    """What to do when a use begins."""

    use: int
    drop: tuple[int, ...]
    """Kept parameters that have to make room."""
    start: tuple[int, ...]
    """To be gathered now, in this order, together."""
    keep: frozenset[int]
    """Not to be released when this use ends."""


@dataclass(frozen=True)
class Plan:
    """The steps of a pass, one per use."""

    steps: tuple[Step, ...]
    peak: int
    """Elements that are whole at most."""
    kept: frozenset[int] = frozenset()
    """Whole when the pass ends, for the pass that follows."""


@dataclass
class _Simulation:
    numel: Mapping[int, int]
    whole: set[int] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)
    """Gathered ahead and not used yet."""
    holds: Counter[int] = field(default_factory=Counter)
    peak: int = 0

    def size(self, shards: set[int]) -> int:
        return sum(self.numel[shard] for shard in shards)

    def admit(self, shard: int) -> None:
        self.whole.add(shard)
        self.peak = max(self.peak, self.size(self.whole))


def plan(
    events: Sequence[Event],
    numel: Mapping[int, int],
    limits: Limits,
    *,
    whole: frozenset[int] = frozenset(),
    returns: bool = False,
) -> Plan:
    """When to gather what, so that as much as allowed is ahead of its use and no more than allowed is whole.

    `whole` are the parameters that are whole when the pass begins. If it `returns`, a backward follows that uses the
    same in reverse, for which parameters are kept too.
    """
    following = [Event(enter, e.use, e.shards) for e in reversed(events) if e.enter for enter in (True, False)]
    passed = [*events, *(following if returns else ())]
    uses = _Uses(passed, numel)
    simulation = _Simulation(numel, whole=set(whole))
    steps: list[Step] = []
    open_at: dict[int, list[int]] = {}
    keeps: dict[int, frozenset[int]] = {}
    for place, event in enumerate(events):
        if event.enter:
            open_at.setdefault(event.use, []).append(len(steps))
            steps.append(_enter(place, event, events, simulation, limits, uses))
        elif open_at.get(event.use):
            keeps[open_at[event.use].pop()] = _leave(place, event, simulation, limits, uses)
    finished = (Step(s.use, s.drop, s.start, keeps.get(i, frozenset())) for i, s in enumerate(steps))
    return Plan(tuple(finished), simulation.peak, frozenset(simulation.whole) if returns else frozenset())


class _Uses:
    """Where each parameter is used next, and how many elements lie between."""

    def __init__(self, events: Sequence[Event], numel: Mapping[int, int]) -> None:
        self._places: dict[int, list[int]] = {}
        self._passed = [0]
        for place, event in enumerate(events):
            size = sum(numel[shard] for shard in event.shards) if event.enter else 0
            self._passed.append(self._passed[-1] + size)
            if event.enter:
                for shard in event.shards:
                    self._places.setdefault(shard, []).append(place)

    def next(self, shard: int, after: int) -> int | None:
        """The place of its next use after `after`."""
        return next((place for place in self._places.get(shard, ()) if place > after), None)

    def distance(self, after: int, place: int) -> int:
        """Elements used between two places."""
        return self._passed[place] - self._passed[after + 1]


def _enter(place: int, event: Event, events: Sequence[Event], now: _Simulation, limits: Limits, uses: _Uses) -> Step:
    needed = [shard for shard in event.shards if shard not in now.whole]
    drop = _make_room(place, sum(now.numel[shard] for shard in needed), event, now, limits, uses)
    for shard in needed:
        now.admit(shard)
    now.unused.difference_update(event.shards)
    for shard in event.shards:
        now.holds[shard] += 1
    start = [*needed, *_ahead(place, events, now, limits)]
    return Step(event.use, tuple(drop), tuple(start), frozenset())


def _make_room(place: int, wanted: int, event: Event, now: _Simulation, limits: Limits, uses: _Uses) -> list[int]:
    """Drop what is kept for later, the farthest use first, until `wanted` fits."""
    drop: list[int] = []
    idle = [s for s in now.whole if not now.holds[s] and s not in event.shards and s not in now.unused]
    idle.sort(key=lambda shard: (uses.next(shard, place) or len(uses._passed), shard))
    while idle and now.size(now.whole) + wanted > limits.live:
        shard = idle.pop()
        now.whole.discard(shard)
        drop.append(shard)
    return drop


def _ahead(place: int, events: Sequence[Event], now: _Simulation, limits: Limits) -> list[int]:
    """What to gather before its turn; in batches, since many small gathers cost more than one."""
    ahead = now.size(now.unused)
    if limits.ahead <= 0 or (ahead and ahead * 2 >= limits.ahead):
        return []
    start: list[int] = []
    live = now.size(now.whole)
    for event in events[place + 1 :]:
        if not event.enter:
            continue
        for shard in event.shards:
            if shard in now.whole:
                continue
            size = now.numel[shard]
            if live + size > limits.live or (ahead + size > limits.ahead and ahead):
                return start
            now.admit(shard)
            now.unused.add(shard)
            start.append(shard)
            live += size
            ahead += size
    return start


def _leave(place: int, event: Event, now: _Simulation, limits: Limits, uses: _Uses) -> frozenset[int]:
    keep: set[int] = set()
    for shard in event.shards:
        now.holds[shard] -= 1
        if now.holds[shard] > 0:
            continue
        again = uses.next(shard, place)
        if again is not None and limits.reuse > 0 and uses.distance(place, again) <= limits.reuse:
            keep.add(shard)
        else:
            now.whole.discard(shard)
    return frozenset(keep)
