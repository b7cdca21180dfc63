"""`SubparamShape`: how several parameters lie in one, which models say in their universal checkpoint rules."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SubparamShape"]


@dataclass
class SubparamShape:
    """A parameter that is several: `shape` has a tuple of their sizes in place of `partition_dim`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int
