"""What agreements between hosts would add to a step: computed, since a fake group has nobody to agree with."""

from __future__ import annotations

import gc
import importlib
import sys

__all__ = ["ROUND_S", "agreements", "waiting_s"]

ROUND_S = 30e-6  # a message to another host and one from it, as Python sees them


def agreements() -> int:
    """How many there have been in this process; 0 for those who have none.

    `deepspeed.zero.agreement.RankAgreement` counts them. An engine has one per axis, wherever they are needed, so
    they are looked for among all objects.
    """
    module = sys.modules.get("deepspeed.zero.agreement")
    if module is None:
        return 0
    return sum(found.exchanges for found in gc.get_objects() if type(found) is module.RankAgreement)


def waiting_s(count: int, world: int) -> float:
    """Seconds that so many agreements of so many ranks take: rounds of messages, one after the other."""
    if not count:
        return 0.0
    rounds: int = importlib.import_module("deepspeed.comm.agreement").rounds(world)
    return count * rounds * ROUND_S
