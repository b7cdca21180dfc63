"""`Landing`: who uses gradients up as they land, so that they never exist all at once.

[Note: gradients that are used up] Who updates parameters while backward runs must not do so before their gradients are
whole: a rank may send a gradient in two rounds, or have none. So each bucket is followed by one flag per gradient,
which travels between hosts: on this rank nothing more comes. Where all ranks say so the gradient is handed over when it
has landed. All others, absent ones among them, add up as ever and wait for what ranks agree upon before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    from deepspeed.zero.states.group import ShardGroup

__all__ = ["Landing", "told_first"]


class Landing(Protocol):
    """Who uses gradients up."""

    def arrived(self, param: nn.Parameter) -> None:
        """A gradient came on this rank; it has not left yet."""

    def leaves_whole(self, param: nn.Parameter) -> bool:
        """True if what leaves now is all that this rank has of a gradient; asked once for each time that it leaves."""

    def landed(self, params: Sequence[nn.Parameter]) -> None:
        """The gradients of these are whole, of all ranks, and lie with their owners."""


def told_first(landing: Landing | None, param: nn.Parameter, group: ShardGroup) -> Callable[[], None] | None:
    """What is done when a gradient arrives, before it may leave; None: nothing."""
    take = group.on_arrival(param)
    if landing is None:
        return take

    def first() -> None:
        landing.arrived(param)
        if take is not None:
            take()

    return first
