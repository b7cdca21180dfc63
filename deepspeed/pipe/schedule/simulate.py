"""Schedules on a clock: how long a batch takes and what each rank holds; whether a schedule can be played."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule.actions import Action, Message, PassKind, Schedule, waits_for


@dataclass(frozen=True)
class Costs:
    """How long a rank takes for its share of one micro-batch; one with several stages does it in as many parts."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    message: float = 0.0  # from the end of a computation to the moment when another rank has its result

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"the time {name!r} is {value}; expected a number of at least 0")
        if self.forward + self.input + self.weight == 0:
            raise UsageError("forward, input and weight all take 0, so that there is nothing to show; give one a time")

    def of(self, action: Action, chunks: int) -> float:
        whole = {
            PassKind.FORWARD: self.forward,
            PassKind.BACKWARD: self.input + self.weight,
            PassKind.INPUT: self.input,
            PassKind.WEIGHT: self.weight,
        }
        return whole[action.op] / chunks


@dataclass(frozen=True)
class Timeline:
    """What a simulation found."""

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  # by rank: (action, begin, end)
    peaks: tuple[int, ...]  # by rank: of how many micro-batches and stages it held activations at most

    @property
    def length(self) -> float:
        return max(end for rank in self.spans for _, _, end in rank)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait."""
        busy = sum(end - begin for rank in self.spans for _, begin, end in rank)
        return 1.0 - busy / (len(self.spans) * self.length)


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] | None = None) -> Timeline:
    """Play a schedule through, with the costs of all ranks or of each; a UsageError if it cannot end."""
    given = [costs or Costs()] * len(schedule.ranks) if costs is None or isinstance(costs, Costs) else list(costs)
    if len(given) != len(schedule.ranks):
        raise UsageError(f"costs of {len(given)} ranks are given, and the schedule has {len(schedule.ranks)}")
    chunks = schedule.chunks
    ended: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.ranks]
    places, free = [0] * len(spans), [0.0] * len(spans)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while places[rank] < len(row):
                action = row[places[rank]]
                begin = _begin(schedule, action, free[rank], ended, given)
                if begin is None:
                    break
                free[rank] = ended[action] = begin + given[rank].of(action, chunks)
                spans[rank].append((action, begin, free[rank]))
                places[rank] += 1
                moved = True
    stuck = [f"rank {r} before {row[places[r]]}" for r, row in enumerate(schedule.ranks) if places[r] < len(row)]
    if stuck:
        raise UsageError(f"schedule {schedule.name!r} cannot end: {', '.join(stuck)} wait for each other")
    return Timeline(schedule, tuple(map(tuple, spans)), tuple(_peak(schedule, row) for row in schedule.ranks))


def _begin(
    schedule: Schedule, action: Action, free: float, ended: dict[Action, float], costs: Sequence[Costs]
) -> float | None:
    begin = free
    for needed in _needed(schedule, action, ended):
        if needed not in ended:
            return None
        sender = schedule.owners[needed.stage]
        far = sender != schedule.owners[action.stage]
        begin = max(begin, ended[needed] + (costs[sender].message if far else 0.0))
    return begin


def _needed(schedule: Schedule, action: Action, ended: dict[Action, float]) -> list[Action]:
    """What an action waits for, however the stage behind it computes its gradient: whole or in parts."""
    needed = []
    for each in waits_for(action, schedule.stages):
        if each.op.passes_back and each.stage != action.stage:
            other = each._replace(op=PassKind.INPUT if each.op is PassKind.BACKWARD else PassKind.BACKWARD)
            each = other if other in ended else each
        needed.append(each)
    return needed


def _peak(schedule: Schedule, row: tuple[Action, ...]) -> int:
    """Activations come with a forward and go with a backward, or with its second part."""
    if schedule.forward_only:
        return 0
    held = peak = 0
    for action in row:
        held += {PassKind.FORWARD: 1, PassKind.INPUT: 0}.get(action.op, -1)
        peak = max(peak, held)
    return peak


def validate(schedule: Schedule) -> Schedule:
    """The schedule, or a UsageError that says what is wrong with it."""
    _complete(schedule)
    _in_order(schedule)
    timeline = simulate(schedule)
    for rank, (peak, limit) in enumerate(zip(timeline.peaks, schedule.limits, strict=True)):
        if peak > limit:
            raise UsageError(
                f"schedule {schedule.name!r}: rank {rank} holds activations of {peak} micro-batches and stages at a "
                f"time, more than its limit of {limit}"
            )
    return schedule


def _complete(schedule: Schedule) -> None:
    """Every stage sees every micro-batch once in each direction, on the rank that holds it."""
    found = Counter(action for row in schedule.ranks for action in row)
    twice = [str(action) for action, count in found.items() if count > 1]
    if twice:
        raise UsageError(f"schedule {schedule.name!r} computes {', '.join(twice[:4])} more than once")
    for rank, row in enumerate(schedule.ranks):
        foreign = [str(action) for action in row if not _belongs(schedule, action, rank)]
        if foreign:
            raise UsageError(f"schedule {schedule.name!r}: {', '.join(foreign[:4])} is not rank {rank}'s to compute")
    for stage in range(schedule.stages):
        for mb in range(schedule.micro_batches):
            have = {op for op in PassKind if Action(op, stage, mb) in found}
            if schedule.forward_only:
                good = have == {PassKind.FORWARD}
            else:
                good = have in (
                    {PassKind.FORWARD, PassKind.BACKWARD},
                    {PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT},
                )
            if not good:
                had = " ".join(sorted(map(str, have))) or "nothing"
                raise UsageError(
                    f"schedule {schedule.name!r}: stage {stage} has {had} of micro-batch {mb}; expected "
                    + ("F" if schedule.forward_only else "F and B, or F, I and W")
                )


def _belongs(schedule: Schedule, action: Action, rank: int) -> bool:
    inside = 0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches
    return inside and schedule.owners[action.stage] == rank


def _in_order(schedule: Schedule) -> None:
    """Every send has its receive, and messages between two ranks are received in the order in which they are sent."""
    sent: dict[tuple[str, int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[str, int, int], list[Message]] = defaultdict(list)
    for action in (action for row in schedule.ranks for action in row):
        if message := schedule.received(action):
            received[message.channel].append(message)
        if message := schedule.sent(action):
            sent[message.channel].append(message)
    for channel in sent.keys() | received.keys():
        if sent[channel] != received[channel]:
            kind, source, target = channel
            at = next(
                (n for n, pair in enumerate(zip(sent[channel], received[channel], strict=False)) if pair[0] != pair[1]),
                min(len(sent[channel]), len(received[channel])),
            )
            raise UsageError(
                f"schedule {schedule.name!r}: {kind} number {at} from rank {source} to rank {target} is not the one "
                "that is received: both ranks must have them in one order"
            )
