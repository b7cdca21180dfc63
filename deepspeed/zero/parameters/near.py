"""Nearer copies of parameters (hpZ): neighbours keep what one gather made whole, for the gathers that follow.

[Note: nearer copies] A pass that makes a parameter whole over all ranks leaves each rank its part of the copy that its
neighbours share; until the values change, parameters become whole among neighbours only. All ranks of an axis must ask
the same ranks. So an edit, which one rank may make alone, only notes that copies are outdated; the ranks learn it at
the begin of the next pass and drop all copies together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel import Axis, AxisGroup
from deepspeed.zero.parameters.gather import Cut, Gather, GatherFor, PlainGather
from deepspeed.zero.parameters.shard import Shard


@dataclass(eq=False)
class NearCopies:
    """All copies of a model."""

    each: list[NearCopy] = field(default_factory=list)
    outdated: bool = False
    """This rank knows of values that changed."""

    def drop(self) -> None:
        """Free all of them; every rank does so before the next pass."""
        for copy in self.each:
            copy.part = None
            copy.coming = False
        self.outdated = False

    def free(self) -> None:
        """As `drop`, between passes; the other ranks follow at the begin of the next one."""
        self.drop()
        self.outdated = True

    @property
    def nbytes(self) -> int:
        """What they use on this rank now."""
        return sum(copy.part.nbytes for copy in self.each if copy.part is not None)


@dataclass(eq=False)
class NearCopy:
    """This rank's part of a parameter's copy among its neighbours."""

    axis: AxisGroup
    """The neighbours."""
    copies: NearCopies
    part: Tensor | None = None
    coming: bool = False
    """The next time that the parameter arrives its part is kept."""

    def outdate(self) -> None:
        """The parameter's values changed."""
        self.copies.outdated = True

    def leave(self) -> None:
        """The parameter travels without copies from now on; on all ranks."""
        self.part, self.coming = None, False
        self.copies.each.remove(self)

    @torch.no_grad()
    def take(self, flat: Tensor) -> None:
        """The whole parameter is there: keep the part, if it was asked for."""
        if self.coming and self.part is not None:
            self.part.copy_(flat.view(self.axis.size, -1)[self.axis.rank])
        self.coming = False


@dataclass(frozen=True)
class NearGather:
    """In a pass from neighbours, where they have a copy; otherwise `far`, which leaves one."""

    far: Gather[Shard]
    near: PlainGather = field(default_factory=lambda: PlainGather(cut=_by_part))

    @torch.no_grad()
    def start(self, shards: Sequence[Shard], serves: GatherFor) -> None:
        in_pass = serves in (GatherFor.FORWARD, GatherFor.BACKWARD)
        close = [shard for shard in shards if in_pass and shard.near is not None and shard.near.part is not None]
        known = set(map(id, close))
        wide = [shard for shard in shards if id(shard) not in known]
        if close:
            self.near.start(close, serves)
        for shard in wide if in_pass else ():
            if shard.near is not None:
                numel = shard.flat.numel() // shard.near.axis.size
                shard.near.part = torch.empty(numel, dtype=shard.dtype, device=shard.device)
                shard.near.coming = True
        if wide:
            self.far.start(wide, serves)


def _by_part(shard: Shard) -> Cut:
    assert shard.near is not None, "only those with copies are gathered nearby"
    assert shard.near.part is not None, "only those with copies are gathered nearby"
    return shard, shard.near.axis, shard.near.part


def near_copies(shards: Sequence[Shard], size: int) -> NearCopies | None:
    """Let runs of `size` neighbours on each axis keep copies; None if none do. All ranks call it together."""
    copies, near = NearCopies(), dict[AxisGroup, AxisGroup | None]()
    for shard in shards:
        axis, shard.near = shard.axis, None
        if axis not in near:
            check_size(axis, min(size, axis.size))  # experts have an axis of their own, of fewer ranks
            intra = axis.split(size=size)[1] if 1 < size < axis.size else None
            if intra is not None:
                _ = intra.group  # made by all ranks now, in the same order
            near[axis] = intra
        neighbours = near[axis]
        if neighbours is not None and shard.numel and shard.codec is None:
            shard.near = NearCopy(neighbours, copies)
            copies.each.append(shard.near)
    return copies if copies.each else None


def check_size(axis: AxisGroup | Axis, size: int) -> None:
    """An error unless copies can be shared by so many neighbours of the axis."""
    if size < 2 or axis.size % size == 0:
        return
    divisors = ", ".join(str(each) for each in range(2, axis.size + 1) if axis.size % each == 0) or "1"
    raise DeepSpeedConfigError(
        f"zero_optimization.zero_hpz_partition_size: {size} does not divide the {axis.size} ranks that share each "
        f"parameter (axis {axis.name!r}). Use one of {divisors}, best the ranks of a node, or 1 for no copies.",
        path="zero_optimization.zero_hpz_partition_size",
    )
