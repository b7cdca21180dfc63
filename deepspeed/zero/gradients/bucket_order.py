"""The order in which gradients leave, the same on all ranks, and when each bucket goes: no tensors, no ranks.

[Note: one order] A bucket leaves when it is its turn and everything expected in it has arrived, or when more waits than
the budget allows: zeros stand for what is absent. What arrives later goes in a second round, before the optimizer step.

Expected are the parameters that arrived in the last backward of this rank, as often as they did then: under reentrant
checkpointing a parameter of several segments arrives several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

_NEVER = 1 << 60


def pack_buckets(
    order: Sequence[int],
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    limit: int,
    *,
    unused: frozenset[int] = frozenset(),
    first: int | None = None,
) -> list[list[int]]:
    """Parameters of one kind that travel together, at most `limit` in size or one of them, in the order of leaving.

    A bucket stands where its last member does. `unused` ones travel together at the very end. `first` limits the
    bucket that is full before all others, so that it leaves early.
    """
    start = limit if first is None else min(first, limit)
    used = _pack([each for each in order if each not in unused], sizes, kinds, limit, start)
    return used + _pack([each for each in order if each in unused], sizes, kinds, limit, limit)


def _pack(
    order: Sequence[int], sizes: Sequence[int], kinds: Sequence[Hashable], limit: int, first: int
) -> list[list[int]]:
    done: list[tuple[int, list[int]]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for place, each in enumerate(order):
        kind, size = kinds[each], sizes[each]
        if kind in open_ and filled[kind] + size > (limit if done else first):
            done.append((last[kind], open_.pop(kind)))
        if kind not in open_:
            open_[kind], filled[kind] = [], 0
        open_[kind].append(each)
        filled[kind] += size
        last[kind] = place
    done += [(last[kind], members) for kind, members in open_.items()]
    return [members for _, members in sorted(done, key=lambda item: item[0])]


class BucketOrder:
    """Says when each bucket of one backward leaves; `go(place)` is called for each, in order."""

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        sizes: Sequence[int],
        go: Callable[[int], None],
        *,
        budget: int,
        kept: int = 0,
    ) -> None:
        """`sizes` are the elements of each parameter, by its number; the last `kept` buckets leave by `rest` alone."""
        self._buckets = buckets
        self._sizes = sizes
        self._go = go
        self._budget = budget
        self._end = len(buckets) - kept
        self._place = {each: place for place, bucket in enumerate(buckets) for each in bucket}
        self._missing: list[int] = []
        self._left: dict[int, int] = {}
        self.next = len(buckets)
        """The bucket whose turn it is."""
        self.waiting = 0
        """Elements that have arrived and not left."""
        self.early = True
        """Buckets may leave while backward runs."""
        self.late: set[int] = set()
        """Parameters that arrived after their bucket had left."""
        self.forced = 0
        """Buckets that left incomplete because too much waited."""
        self.blocked = 0
        """Buckets that had to wait for the end of backward with gradients in them."""
        self.sequence: list[int] = []
        """Arrivals of the backward that runs, in order; the last one of each parameter counts."""
        self.positions: dict[int, int] = {}
        """Where the pass was at those, by the clock that `Arrivals` has."""
        self._here: set[int] = set()

    def take_over(self, old: BucketOrder, *, running: bool) -> None:
        """Continue what `old` began; if a backward is `running`, its gradients have all arrived.

        What has arrived there and not left leaves by the buckets of this one. If `old` has sent all but what is kept
        back, nothing is sent twice; else every bucket leaves, with zeros for what has left.
        """
        self.late, self.sequence = set(old.late), old.sequence
        if running:
            self.early = False
            self._here, self.waiting = set(old._here), old.waiting
            self.next = self._end if old.next >= old._end else 0

    def expect(self, counts: Mapping[int, int] | None) -> None:
        """A backward begins in which each parameter arrives so often; None: each once."""
        self._left = dict.fromkeys(self._place, 1) if counts is None else dict(counts)
        missing = [0] * len(self._buckets)
        for each, count in self._left.items():
            if each in self._place:
                missing[self._place[each]] += count
        self._missing = [count or _NEVER for count in missing]
        self.next = 0
        self.sequence = []
        self.forced = self.blocked = 0
        self._here = {each for each in self._here if each in self._place}

    def place_of(self, each: int) -> int:
        """The bucket that it belongs to."""
        return self._place[each]

    def arrive(self, each: int) -> bool:
        """A gradient is there, or is added to one that is; False if its bucket had left, so that it is late."""
        self.sequence.append(each)
        place = self._place[each]
        if place < self.next:
            self.late.add(each)
            return False
        if each not in self._here:
            self._here.add(each)
            self.waiting += self._sizes[each]
        if self._left.get(each):
            self._left[each] -= 1
            self._missing[place] -= 1
        if self.early and self.next < self._end and (self.waiting > self._budget or not self._missing[self.next]):
            self._depart()
        return True

    def ready(self) -> tuple[int, int]:
        """How many buckets may have left by now, and how many must have because too much waits."""
        may = self.next
        while may < self._end and not self._missing[may]:
            may += 1
        must, waiting = self.next, self.waiting
        while must < self._end and waiting > self._budget:
            waiting -= sum(self._sizes[each] for each in self._buckets[must] if each in self._here)
            must += 1
        return may, must

    def state(self) -> tuple[int, int, list[int], list[int]]:
        """What decides which bucket is launched next."""
        return self.next, self.waiting, sorted(self._here), self._missing

    def launch_until(self, until: int | None) -> None:
        """Buckets leave until so many have, complete or not; None: all that are not kept back."""
        while self.next < (self._end if until is None else min(until, self._end)):
            self.forced += bool(self._missing[self.next])
            self._leave()

    def rest(self, *, kept: bool = True) -> None:
        """The backward is over: whatever has not left leaves, with or without those that are `kept` back."""
        while self.next < (len(self._buckets) if kept else self._end):
            self.blocked += self.early and not self._here.isdisjoint(self._buckets[self.next])
            self._leave()

    def reset(self) -> None:
        """Everything that has arrived was sent or dropped."""
        self._here.clear()
        self.late.clear()
        self.waiting = 0
        self.next = len(self._buckets)

    def counts(self) -> dict[int, int]:
        """How often each parameter arrived in this backward."""
        return Counter(self.sequence)

    def learned(self) -> list[int]:
        """The parameters in the order in which their last gradients arrived in this backward."""
        last = {each: place for place, each in enumerate(self.sequence)}
        return sorted(last, key=last.__getitem__)

    def _depart(self) -> None:
        while self.next < self._end:
            ready = not self._missing[self.next]
            if not ready and self.waiting <= self._budget:
                return
            self.forced += not ready
            self._leave()

    def _leave(self) -> None:
        place = self.next
        self.next += 1
        bucket = self._buckets[place]
        self.waiting -= sum(map(self._sizes.__getitem__, self._here.intersection(bucket)))
        self._here.difference_update(bucket)
        self.late.difference_update(bucket)  # what came late before goes now
        self._go(place)
