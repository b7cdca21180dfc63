"""The passes of one rank: its actions, their messages, and which bring the last gradients of some weights."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.pipe.schedule.actions import Action, Message, Op, Schedule

__all__ = ["Pass", "passes_of"]

# What brings gradients to the same weights as an operation does: I to those that cannot wait, W to the others.
_ALIKE = {
    Op.BACKWARD: (Op.BACKWARD, Op.INPUT, Op.WEIGHT),
    Op.INPUT: (Op.BACKWARD, Op.INPUT),
    Op.WEIGHT: (Op.BACKWARD, Op.WEIGHT),
}


@dataclass(frozen=True)
class Pass:
    """One action as a rank runs it."""

    action: Action
    received: Message | None = None
    """What another rank sends for it."""
    sent: Message | None = None
    """What it gives to another rank."""
    final: bool = False
    """The weights that it brings gradients to get no more of them."""
    more: bool = False
    """Another final pass follows on this rank."""


def passes_of(schedule: Schedule, rank: int, *, splits: bool) -> list[Pass]:
    """The passes of a rank; where backward is not split, or nobody waits for the inputs' gradients, I is B."""
    row = [each for action in schedule.ranks[rank] for each in _whole(action, splits=splits and action.stage > 0)]
    found: list[Pass] = []
    later: set[tuple[Op, int]] = set()
    more = False
    for action in reversed(row):
        alike = _ALIKE.get(action.op, ())
        final = bool(alike) and not any((op, action.stage) in later for op in alike)
        found.append(Pass(action, schedule.received(action), schedule.sent(action), final, more))
        later.add((action.op, action.stage))
        more = more or final
    return found[::-1]


def _whole(action: Action, *, splits: bool) -> list[Action]:
    if splits or action.op in (Op.FORWARD, Op.BACKWARD):
        return [action]
    return [action._replace(op=Op.BACKWARD)] if action.op is Op.INPUT else []
