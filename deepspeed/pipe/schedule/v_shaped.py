"""Schedules whose stages go down the ranks and up again: ZBV and DualPipeV. The first and the last stage are on rank 0.

Where a rank holds the stages r and 2p-1-r, the loss is on the rank that begins, and a gradient comes back at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepspeed.pipe.schedule.actions import Action, Op, Schedule
from deepspeed.pipe.schedule.generators import require_sizes
from deepspeed.pipe.schedule.simulate import Costs, simulate

__all__ = ["dual_pipe_v", "folded", "zbv"]

_F, _B, _I, _W = Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT

# (operation, chunk), the most urgent first.
_ORDERS = (
    ((_F, 1), (_I, 1), (_F, 0), (_I, 0), (_W, 1), (_W, 0)),
    ((_I, 0), (_F, 1), (_F, 0), (_I, 1), (_W, 1), (_W, 0)),
    ((_I, 0), (_I, 1), (_F, 1), (_F, 0), (_W, 1), (_W, 0)),
)

_MESSAGES = (Costs(), Costs(message=0.05))
"""Without and with messages that take time."""


def folded(ranks: int) -> tuple[int, ...]:
    """Stage → rank where stages go down the ranks and up again: 0, 1, …, 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


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
    found += [_Play(ranks, micro_batches, order).run() for order in _ORDERS]
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


@dataclass
class _Rank:
    """Where a rank is: how many of each kind it has done, by operation and chunk."""

    done: dict[tuple[Op, int], int] = field(default_factory=lambda: {(op, c): 0 for op in (_F, _I, _W) for c in (0, 1)})
    held: int = 0
    actions: list[Action] = field(default_factory=list)


class _Play:
    """One time step after the other, in which every part of a stage takes one step."""

    def __init__(self, ranks: int, micro_batches: int, order: Sequence[tuple[Op, int]]) -> None:
        self.count, self.micro_batches, self.order = ranks, micro_batches, order
        self.limit = min(2 * ranks, 2 * micro_batches)
        self.ranks = [_Rank() for _ in range(ranks)]
        self.ended: dict[Action, int] = {}

    def run(self) -> Schedule:
        """Play until everything is done."""
        total, now = 6 * self.micro_batches, 0
        while any(len(rank.actions) < total for rank in self.ranks):
            chosen = [(rank, self._choose(number, rank, now)) for number, rank in enumerate(self.ranks)]
            for rank, action in chosen:
                if action is not None:
                    self._take(rank, action, now + 1)
            now += 1
        rows = tuple(tuple(rank.actions) for rank in self.ranks)
        return Schedule("zbv", self.micro_batches, folded(self.count), rows, (self.limit,) * self.count)

    def _stage(self, number: int, chunk: int) -> int:
        return 2 * self.count - 1 - number if chunk else number

    def _choose(self, number: int, rank: _Rank, now: int) -> Action | None:
        for op, chunk in self.order:
            micro_batch = rank.done[op, chunk]
            if micro_batch == self.micro_batches:
                continue
            if op is _F and rank.held > self.limit - 2 + chunk:
                continue  # one place is kept for the way back to the loss, which makes room
            action = Action(op, self._stage(number, chunk), micro_batch)
            if self._ready(action, now):
                return action
        return None

    def _ready(self, action: Action, now: int) -> bool:
        op, stage, mb = action
        last = 2 * self.count - 1
        if op is _F:
            needed = [Action(_F, stage - 1, mb)] if stage else []
        elif op is _W:
            needed = [Action(_I, stage, mb)]
        else:
            needed = [Action(_F, stage, mb), *([Action(_I, stage + 1, mb)] if stage < last else [])]
        return all(self.ended.get(each, now + 1) <= now for each in needed)

    def _take(self, rank: _Rank, action: Action, end: int) -> None:
        chunk = int(action.stage >= self.count)
        rank.done[action.op, chunk] += 1
        rank.held += {_F: 1, _W: -1}.get(action.op, 0)
        rank.actions.append(action)
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
            yield self._forward(0)
        for _ in range(self.rank + 1):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(after):
            yield self._input(1)
            yield from self._weight()
            yield self._forward(1)
        for _ in range(self.micro_batches - 2 * self.ranks + self.rank + 1):
            yield self._forward(0)
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for _ in range(after):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        yield from self._end(after)

    def _end(self, after: int) -> Iterator[Action]:
        both = self.rank + 1
        splits = False
        for turn in range(both):
            splits = splits or (turn == both // 2 and self.rank % 2 == 1)
            yield self._input(1) if splits else self._backward(1)
            splits = splits or (turn == both // 2 and self.rank % 2 == 0)
            yield self._input(0) if splits else self._backward(0)
        for _ in range(after):
            yield from self._weight()
            yield self._input(0)
        while self.waiting:
            yield from self._weight()

    def _next(self, op: Op, chunk: int, counted: Op) -> Action:
        micro_batch = self.done[counted, chunk]
        self.done[counted, chunk] += 1
        return Action(op, 2 * self.ranks - 1 - self.rank if chunk else self.rank, micro_batch)

    def _forward(self, chunk: int) -> Action:
        return self._next(_F, chunk, _F)

    def _backward(self, chunk: int) -> Action:
        return self._next(_B, chunk, _B)

    def _input(self, chunk: int) -> Action:
        action = self._next(_I, chunk, _B)
        self.waiting.append(Action(_W, action.stage, action.micro_batch))
        return action

    def _weight(self) -> Iterator[Action]:
        if self.waiting:
            yield self.waiting.pop(0)
