"""Over which ranks a parameter's states are cut, and where equal copies of them lie: `Placement`, `ShardAxes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed.errors import LayoutError
from deepspeed.parallel import AxisGroup, hierarchy


class NodeGroups(NamedTuple):
    """The ranks of an axis across nodes and within one, with process groups for their gradients."""

    inter: AxisGroup
    intra: AxisGroup
    across: Any
    within: Any


def node_groups(axis: AxisGroup) -> NodeGroups | None:
    """None where an axis has one node, or not as many ranks, two or more, on each. All ranks call it together."""
    try:
        inter, intra = axis.split(intra_node=True)
    except LayoutError:
        return None
    return NodeGroups(inter, intra, inter.twin(), intra.twin()) if inter.size > 1 and intra.size > 1 else None


@dataclass(frozen=True, eq=False)
class Placement:
    """What a parameter knows of its ranks; parameters with the same object travel together.

    The ranks of `shard` times those of `replicate` are all that hold the parameter, each for its own samples: its
    gradient is the mean over them, or over `samples`. Data-parallel ranks shard a dense parameter over all of them;
    expert parameters are sharded over the ranks that hold the same expert; MiCS shards over a part of the ranks and
    replicates over the rest.
    """

    shard: AxisGroup
    """Over which masters, moments, gradients and, at stage 3, the parameter itself are cut."""
    replicate: AxisGroup | None = None
    """Over which equal shards lie; None if there is one of each."""
    gradient_group: Any = None
    """The process group of `shard` on which gradients travel; None: that of the axis."""
    samples: int | None = None
    """Ranks whose samples make up its gradient, if these are others than those that hold it: to an expert come tokens
    of ranks that do not hold it."""
    late: bool = False
    """Copies of gradients are averaged once before the step, not after each backward."""
    nodes: NodeGroups | None = None
    """The nodes of `shard`, where gradients travel within them first."""

    @property
    def copies(self) -> int:
        """Ranks that hold the same elements."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard.size * self.copies if self.samples is None else self.samples

    @property
    def group(self) -> Any:
        """The process group on which gradients travel."""
        return self.shard.group if self.gradient_group is None else self.gradient_group


AxisOf = Callable[[nn.Parameter], Placement]
"""Each parameter's placement; asked by everyone who moves parameters, gradients or states."""


LiesOn = Callable[[Tensor], AxisGroup]
"""The ranks that hold the same elements of a parameter or buffer, whole or in shards."""


def placed(lies_on: LiesOn, make: Callable[[AxisGroup], Placement]) -> AxisOf:
    """Placements by the ranks that parameters lie on; those on the same ranks have the same object."""
    known: dict[tuple[int, ...], Placement] = {}

    def axis_of(param: nn.Parameter) -> Placement:
        axis = lies_on(param)
        if axis.ranks not in known:
            known[axis.ranks] = make(axis)
        return known[axis.ranks]

    return axis_of


class ShardAxes:
    """The axes that parameters are cut over: all ranks that hold them, or with MiCS runs of `size` of these.

    All ranks ask for their axes in the same order.
    """

    def __init__(self, lies_on: LiesOn, size: int = -1) -> None:
        self._lies_on = lies_on
        self._size = size
        self._known: dict[tuple[int, ...], tuple[AxisGroup, AxisGroup | None]] = {}

    def __call__(self, param: Tensor) -> AxisGroup:
        """The ranks that have a shard each of a parameter."""
        return self.levels(self._lies_on(param))[0]

    def replicas(self, param: Tensor) -> AxisGroup | None:
        """The ranks that have equal shards of a parameter; None if there is one of each."""
        return self.levels(self._lies_on(param))[1]

    def levels(self, axis: AxisGroup) -> tuple[AxisGroup, AxisGroup | None]:
        """The same of parameters that lie on all ranks of an axis."""
        if self._size < 1:
            return axis, None
        if axis.ranks not in self._known:
            hierarchy.mics_split(axis.axis, self._size)
            inter, intra = axis.split(size=self._size)
            _ = intra.group, inter.group
            self._known[axis.ranks] = (intra, inter) if inter.size > 1 else (axis, None)
        return self._known[axis.ranks]
