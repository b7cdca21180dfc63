"""`Placement`: over which ranks a parameter's states are cut, and where equal copies of them lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.parallel import AxisGroup

__all__ = ["AxisOf", "Placement", "everywhere"]


@dataclass(frozen=True, eq=False)
class Placement:
    """What a parameter knows of its ranks; parameters with the same object travel together.

    The ranks of `shard` times those of `replicate` are all that hold the parameter, each for its own samples: its
    gradient is the mean over them. Data-parallel ranks shard a dense parameter over all of them; expert parameters
    are sharded over the ranks that hold the same expert; MiCS shards over a part of the ranks and replicates over the
    rest.
    """

    shard: AxisGroup
    """Over which masters, moments, gradients and, at stage 3, the parameter itself are cut."""
    replicate: AxisGroup | None = None
    """Over which equal shards lie; None if there is one of each."""
    gradient_group: Any = None
    """The process group of `shard` on which gradients travel; None: that of the axis."""

    @property
    def copies(self) -> int:
        """Ranks that hold the same elements."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard.size * self.copies

    @property
    def group(self) -> Any:
        """The process group on which gradients travel."""
        return self.shard.group if self.gradient_group is None else self.gradient_group


AxisOf = Callable[[nn.Parameter], Placement]
"""Each parameter's placement; asked by everyone who moves parameters, gradients or states."""


def everywhere(placement: Placement) -> AxisOf:
    """All parameters lie on the same ranks."""

    def axis_of(_: nn.Parameter) -> Placement:
        return placement

    return axis_of
