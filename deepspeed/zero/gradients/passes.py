"""What gathers parameters for a backward, as the reducer of its gradients sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn

__all__ = ["Passes"]


class Passes(Protocol):
    """What gathers parameters for a backward, as the reducer sees it."""

    notice: Callable[[], None] | None

    def begin_backward(self) -> None:
        """A backward begins."""

    def end_backward(self) -> None:
        """A backward is over."""

    def first_uses(self) -> Iterable[nn.Parameter]:
        """Parameters in the order in which the forward first used them, the same on all ranks."""

    def abandon(self) -> None:
        """A backward failed."""

    def forget_graphs(self) -> None:
        """Parameters are about to change: no graph that was made with them is differentiated any more."""

    def retrace(self) -> None:
        """Gradients came late: look again at when they come."""

    @property
    def position(self) -> int:
        """Where the backward is that runs, at places that all ranks come to."""
