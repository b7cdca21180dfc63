"""The validator: a schedule is complete, ends, sends what is received in that order, and holds no more than it says."""

from __future__ import annotations

from collections import Counter, defaultdict

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule.actions import Action, Message, Op, Schedule, messages
from deepspeed.pipe.schedule.simulate import simulate

__all__ = ["validate"]


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
            have = {op for op in Op if Action(op, stage, mb) in found}
            if schedule.forward_only:
                good = have == {Op.FORWARD}
            else:
                good = have in ({Op.FORWARD, Op.BACKWARD}, {Op.FORWARD, Op.INPUT, Op.WEIGHT})
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
    for row in schedule.ranks:
        for direction, message in messages(schedule, row):
            (sent if direction == "send" else received)[message.channel].append(message)
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
