"""The schedules by name, and how each is made: GPipe, 1F1B, interleaved, zero-bubble, V-shaped.

Where a rank holds the stages r and 2p-1-r, the loss is on the rank that begins, and a gradient comes back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepspeed.errors import UsageError
from deepspeed.parallel.balance import partition_uniform
from deepspeed.pipe.schedule.actions import Action, PassKind, Schedule, waits_for
from deepspeed.pipe.schedule.simulate import Costs, simulate, validate

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT


def require_sizes(name: str, ranks: int, micro_batches: int, *, least: int = 1, chunks: int = 1) -> None:
    """Refuse numbers that no schedule of this name has."""
    if ranks < 1 or chunks < 1:
        raise UsageError(f"schedule {name!r}: found {ranks} ranks with {chunks} stages each; each is at least 1")
    if micro_batches < least:
        raise UsageError(
            f"schedule {name!r} on {ranks} pipeline ranks needs at least {least} micro-batches; found {micro_batches}. "
            "Raise gradient_accumulation_steps, or choose another schedule."
        )


def straight(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage → rank where every rank holds one stage."""
    return tuple(range(ranks))


def folded(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Stage → rank where stages go down the ranks and up again: 0, 1, …, 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage → rank where stages go round the ranks: 0, 1, …, 0, 1, …."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _plain(name: str, micro_batches: int, actions: Sequence[Iterable[Action]], limits: Iterable[int]) -> Schedule:
    return Schedule(name, micro_batches, straight(len(actions)), tuple(map(tuple, actions)), tuple(limits))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, last micro-batch first: its activations are the newest."""
    require_sizes("gpipe", ranks, micro_batches)
    actions = [
        [Action(_F, rank, mb) for mb in range(micro_batches)]
        + [Action(_B, rank, mb) for mb in reversed(range(micro_batches))]
        for rank in range(ranks)
    ]
    return _plain("gpipe", micro_batches, actions, [micro_batches] * ranks)


def forward_only(ranks: int, micro_batches: int, owners: tuple[int, ...] | None = None) -> Schedule:
    """The forward of every micro-batch through the stages of `owners`; nothing is kept for a backward."""
    require_sizes("forward", ranks, micro_batches)
    places = owners or straight(ranks)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(places):
        rows[rank] += [Action(_F, stage, mb) for mb in range(micro_batches)]
    for row in rows:  # in the order in which inputs come if micro-batches follow each other at once
        row.sort(key=lambda action: (action.micro_batch + action.stage, -action.stage))
    return Schedule("forward", micro_batches, places, tuple(map(tuple, rows)), (0,) * ranks, forward_only=True)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Forwards until the pipeline is full, then one backward after each forward."""
    require_sizes("1f1b", ranks, micro_batches)
    limits = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    actions = [list(_one_and_one(rank, micro_batches, limits[rank] - 1)) for rank in range(ranks)]
    return _plain("1f1b", micro_batches, actions, limits)


def _one_and_one(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    for mb in range(micro_batches + ahead):
        if mb < micro_batches:
            yield Action(_F, stage, mb)
        if mb >= ahead:
            yield Action(_B, stage, mb - ahead)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward is split: weights' gradients wait and fill the time at the end.

    Rank r lets r of them wait, so that no rank holds more than the first rank of 1F1B does.
    """
    require_sizes("zb-h1", ranks, micro_batches)
    actions = [list(_delayed(rank, micro_batches, min(ranks - rank, micro_batches) - 1)) for rank in range(ranks)]
    return _plain("zb-h1", micro_batches, actions, [min(ranks, micro_batches)] * ranks)


def _delayed(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    waiting: list[int] = []
    for action in _one_and_one(stage, micro_batches, ahead):
        if action.op is _F:
            yield action
            continue
        yield Action(_I, stage, action.micro_batch)
        waiting.append(action.micro_batch)
        if len(waiting) > stage:
            yield Action(_W, stage, waiting.pop(0))
    for mb in waiting:
        yield Action(_W, stage, mb)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over several stages per rank, in groups of at least as many micro-batches as there are ranks.

    The bubble is that of 1F1B divided by the number of stages on a rank, for as many times the messages.
    """
    require_sizes("interleaved", ranks, micro_batches, chunks=chunks)
    total = micro_batches * chunks
    groups = _groups(ranks, micro_batches)
    rows, limits = [], []
    for rank in range(ranks):
        warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]))
        mine = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [Action(_F, stage, mb) for group in groups for stage in mine for mb in group]
        backwards = [Action(_B, stage, mb) for group in groups for stage in reversed(mine) for mb in group]
        rows.append(tuple(_merge(forwards, backwards, warmup)))
        limits.append(min(total, warmup + 1))
    return Schedule("interleaved", micro_batches, looped(ranks, chunks), tuple(rows), tuple(limits))


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """Micro-batches that go through all stages together: the larger groups first, none below the number of ranks.

    A smaller one would come round before the gradients that make room for it.
    """
    bounds = partition_uniform(micro_batches, max(1, micro_batches // ranks))
    return [range(first, last) for first, last in pairwise(bounds)]


def _merge(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> Iterator[Action]:
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


# (operation, chunk), the most urgent first.
_ORDERS = (
    ((_F, 1), (_I, 1), (_F, 0), (_I, 0), (_W, 1), (_W, 0)),
    ((_I, 0), (_F, 1), (_F, 0), (_I, 1), (_W, 1), (_W, 0)),
    ((_I, 0), (_I, 1), (_F, 1), (_F, 0), (_W, 1), (_W, 0)),
)

_MESSAGES = (Costs(), Costs(message=0.05))
"""Without and with messages that take time."""


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """Split backward over a V: hardly any rank that has begun waits, if the three parts take equally long.

    Two ways to make it are tried. Written down, it repeats one pattern, in which messages have the time of other work
    to arrive. Played through, a rank that is free computes what others wait for first, and gradients of weights when
    there is nothing else or no room for a further forward; which of several is waited for most depends on the numbers,
    so that is done in three orders. The shortest is taken, and of those the one that suffers least where messages
    take time.
    """
    require_sizes("zbv", ranks, micro_batches)
    limits = (min(2 * ranks, 2 * micro_batches),) * ranks
    repeated = tuple(tuple(_repeated(rank, ranks, micro_batches)) for rank in range(ranks))
    found = [Schedule("zbv", micro_batches, folded(ranks), repeated, limits)]
    found += [_Simulation(ranks, micro_batches, order).run() for order in _ORDERS]
    return min(found, key=lambda each: tuple(round(simulate(each, costs).length, 6) for costs in _MESSAGES))


def _repeated(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """One rank's part of the pattern; where there are too few micro-batches for it, those that are missing fall out."""
    after = ranks - rank - 1  # ranks further down
    many = max(micro_batches, 2 * ranks - 1)
    done = {(op, chunk): 0 for op in (_F, _I, _W) for chunk in (0, 1)}
    row = [(_F, 0)] * (2 * after + 1) + [(_F, 1), (_F, 0)] * rank + [(_F, 1), (_I, 1), (_W, 1)] * (after + 1)
    steady = many - row.count((_F, 1))  # micro-batches that are still to come back through the second stage
    ahead = many - row.count((_F, 0))
    for turn in range(steady):
        row += [(_F, 0)] * (turn < ahead) + [(_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1)]
    row += [(_I, 0), (_I, 1)] * rank + [(_I, 0), (_W, 0)] * (after + 1)
    row += [(_W, chunk) for chunk in (1, 0) for _ in range(many - row.count((_W, chunk)))]
    for op, chunk in row:
        micro_batch = done[op, chunk]
        done[op, chunk] += 1
        if micro_batch < micro_batches:
            yield Action(op, 2 * ranks - 1 - rank if chunk else rank, micro_batch)


class _Simulation:
    """One time step after the other, in which every part of a stage takes one step."""

    def __init__(self, ranks: int, micro_batches: int, order: Sequence[tuple[PassKind, int]]) -> None:
        self.count, self.micro_batches, self.order = ranks, micro_batches, order
        self.limit = min(2 * ranks, 2 * micro_batches)
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.done = [{(op, chunk): 0 for op in (_F, _I, _W) for chunk in (0, 1)} for _ in range(ranks)]
        self.held = [0] * ranks
        self.ended: dict[Action, int] = {}

    def run(self) -> Schedule:
        total, now = 6 * self.micro_batches, 0
        while any(len(row) < total for row in self.rows):
            chosen = [self._choose(rank, now) for rank in range(self.count)]
            now += 1
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._take(rank, action, now)
        rows = tuple(map(tuple, self.rows))
        return Schedule("zbv", self.micro_batches, folded(self.count), rows, (self.limit,) * self.count)

    def _choose(self, rank: int, now: int) -> Action | None:
        for op, chunk in self.order:
            micro_batch = self.done[rank][op, chunk]
            if micro_batch == self.micro_batches:
                continue
            if op is _F and self.held[rank] > self.limit - 2 + chunk:
                continue  # one place is kept for the way back to the loss, which makes room
            action = Action(op, 2 * self.count - 1 - rank if chunk else rank, micro_batch)
            if all(self.ended.get(each, now + 1) <= now for each in waits_for(action, 2 * self.count)):
                return action
        return None

    def _take(self, rank: int, action: Action, end: int) -> None:
        self.done[rank][action.op, int(action.stage >= self.count)] += 1
        self.held[rank] += {_F: 1, _W: -1}.get(action.op, 0)
        self.rows[rank].append(action)
        self.ended[action] = end


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Forwards of one direction beside backwards of the other, so that their communication hides each other's.

    Backward is split only where a rank would wait otherwise: before the steady part and at the end.
    """
    require_sizes("dualpipev", ranks, micro_batches, least=2 * ranks)
    rows = tuple(tuple(_Dual(rank, ranks, micro_batches).actions()) for rank in range(ranks))
    return Schedule("dualpipev", micro_batches, folded(ranks), rows, (min(2 * ranks + 1, 2 * micro_batches),) * ranks)


class _Dual:
    """The eight parts of one rank's share."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.done = {(op, chunk): 0 for op in (_F, _B) for chunk in (0, 1)}
        self.waiting: list[Action] = []

    def actions(self) -> Iterator[Action]:
        after = self.ranks - self.rank - 1  # ranks further down
        for _ in range(2 * after):
            yield self._next(_F, 0)
        for _ in range(self.rank + 1):
            yield self._next(_F, 0)
            yield self._next(_F, 1)
        for _ in range(after):
            yield self._input(1)
            yield from self._weight()
            yield self._next(_F, 1)
        for _ in range(self.micro_batches - 2 * self.ranks + self.rank + 1):
            yield self._next(_F, 0)
            yield self._next(_B, 1)
            yield self._next(_F, 1)
            yield self._next(_B, 0)
        for _ in range(after):
            yield self._next(_B, 1)
            yield self._next(_F, 1)
            yield self._next(_B, 0)
        yield from self._end(after)

    def _end(self, after: int) -> Iterator[Action]:
        both = self.rank + 1
        splits = False
        for turn in range(both):
            splits = splits or (turn == both // 2 and self.rank % 2 == 1)
            yield self._input(1) if splits else self._next(_B, 1)
            splits = splits or (turn == both // 2 and self.rank % 2 == 0)
            yield self._input(0) if splits else self._next(_B, 0)
        for _ in range(after):
            yield from self._weight()
            yield self._input(0)
        while self.waiting:
            yield from self._weight()

    def _next(self, op: PassKind, chunk: int) -> Action:
        counted = _F if op is _F else _B
        micro_batch = self.done[counted, chunk]
        self.done[counted, chunk] += 1
        return Action(op, 2 * self.ranks - 1 - self.rank if chunk else self.rank, micro_batch)

    def _input(self, chunk: int) -> Action:
        action = self._next(_I, chunk)
        self.waiting.append(action._replace(op=_W))
        return action

    def _weight(self) -> Iterator[Action]:
        if self.waiting:
            yield self.waiting.pop(0)


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that can be chosen."""

    make: Callable[..., Schedule]
    owners: Callable[[int, int], tuple[int, ...]]  # (ranks, stages on each) → stage → rank
    chunks: int = 1  # stages on each rank, unless the config says otherwise
    chosen: bool = False  # the config may say otherwise


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe, straight),
    "1f1b": ScheduleKind(one_f_one_b, straight),
    "interleaved": ScheduleKind(interleaved, looped, chunks=2, chosen=True),
    "zb-h1": ScheduleKind(zb_h1, straight),
    "zbv": ScheduleKind(zbv, folded, chunks=2),
    "dualpipev": ScheduleKind(dual_pipe_v, folded, chunks=2),
}


def kind_of(name: str) -> ScheduleKind:
    """The schedule of a name; an error that lists them if there is none."""
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def make(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule by its name, validated."""
    kind = kind_of(name)
    if kind.chosen:
        return validate(kind.make(ranks, micro_batches, kind.chunks if chunks is None else chunks))
    if chunks not in (None, kind.chunks):
        raise UsageError(f"schedule {name!r} puts {kind.chunks} stages on each rank; found {chunks}")
    return validate(kind.make(ranks, micro_batches))
