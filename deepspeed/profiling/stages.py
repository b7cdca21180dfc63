"""What a profile knows of the other stages where a model is a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["StageGroup"]


@dataclass(frozen=True)
class StageGroup:
    """One rank of each stage: those that profile, of which the first prints."""

    name: str
    """This rank and its stages, as a heading."""
    prints: bool
    passes: int
    """Forwards in which a micro-batch passes through this rank: it may hold several stages."""
    gather: Callable[[Any], list[Any]]
    """What all of them say, in the order of the stages; called by all of them together."""
    counted_elsewhere: Callable[[], int]
    """How many of this rank's parameters a stage before it has, too."""
