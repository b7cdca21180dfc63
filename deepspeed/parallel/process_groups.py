"""The process groups of a layout: made on demand in one agreed order, one per rank set, destroyed by who made them.

[Note: agreed order] A process group is made by all ranks of the world together, also by those outside it. So the
first use of an axis makes all of its groups, in the order of the axis, and every rank has to use its axes for the
first time in the same order. Groups of one rank are the exception: they concern nobody else. Where torch pretends that
there are other ranks (its backend "fake"), a rank makes its own groups alone. What a rank remembers of the groups of
others is how their axis is laid out, so that nothing here grows with the world but the ranks of its own groups.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm import shared_memory
from deepspeed.comm.init import default_timeout
from deepspeed.comm.watch.settings import timeout_of
from deepspeed.errors import LayoutError
from deepspeed.parallel.axes import Axis, GridGroups, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True)
class _OwnGroup:
    """The group of this rank alone, and how many asked for it."""

    group: ProcessGroup | None = None
    users: int = 0


_OWN: WeakKeyDictionary[ProcessGroup, _OwnGroup] = WeakKeyDictionary()
"""By world. torch names a group that members make alone by its ranks and the number of groups there are, so that a
second one can get the name of the first after others were destroyed."""


def create_group(
    ranks: Sequence[int], *, alone: bool = False, backend: str | None = None, name: str | None = None
) -> ProcessGroup | None:
    """Make one process group, None on ranks outside it; the only place in this layer that does.

    With `alone` only the members take part; that is no act of the world and does not count in its sequence. `name` is
    what errors call it.
    """
    if dist.get_backend() == "fake":
        backend = None  # there are no other ranks, whatever the backend
    if alone and len(ranks) == 1 and backend is None:
        own = _OWN.setdefault(comm.get_world_group(), _OwnGroup())
        own.users += 1
        if own.group is not None:
            return own.group
    options: dict[str, Any] = {"backend": backend, "timeout": world_timeout(), "group_desc": name}
    if alone:
        group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
        if len(ranks) == 1 and backend is None:
            _OWN[comm.get_world_group()].group = group
    else:
        group = comm.new_group(list(ranks), **options)
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def world_timeout() -> timedelta:
    """How long an operation of the world may take: its groups wait as long."""
    found = timeout_of(dist.group.WORLD)
    return default_timeout(os.environ) if found is None else found


def destroy_group(group: ProcessGroup) -> None:
    """Destroy a group made by `create_group`; one that went down with its world, or has other users, is passed over."""
    if not comm.is_initialized():
        return
    own = _OWN.get(comm.get_world_group())
    if own is not None and own.group is group:
        own.users -= 1
        if own.users:
            return
        del _OWN[comm.get_world_group()]
    try:
        comm.destroy_process_group(group)
    except ValueError:
        # torch no longer knows the group: the world it belonged to was destroyed and another one made since.
        return


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the world size; an error where there is no world."""
    if not comm.is_initialized():
        raise LayoutError(
            "torch.distributed is not initialised, so rank and world size are unknown. "
            "Call deepspeed.init_distributed() first, or ParallelLayout.plan(world=…) for a layout without processes."
        )
    return comm.get_rank(), comm.get_world_size()


def ranks_of(group: ProcessGroup) -> Ranks:
    """The global ranks of a group."""
    return tuple(comm.get_all_ranks_from_group(group))


class GroupTable:
    """The groups of one world, deduplicated by rank set; those it made are destroyed by `close()`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.closed = False
        self._home = dist.group.WORLD if comm.is_initialized() else None
        self._groups: dict[Ranks, ProcessGroup] = {}
        self._grids: list[GridGroups] = []
        self._others: set[Ranks] = set()
        self._made: list[ProcessGroup] = []

    @property
    def alive(self) -> bool:
        """False once closed, or once the world in which the groups were made is gone."""
        return not self.closed and (self._home is None or self._home is dist.group.WORLD)

    def adopt(self, axis: Axis, group: ProcessGroup) -> None:
        """Use a group that somebody else made and will destroy; every rank adopts its own one of the axis."""
        mine = axis.group_of(self.rank)
        if ranks_of(group) != mine:
            raise LayoutError(
                f"rank {self.rank}: the given group for axis {axis.name!r} holds the ranks {list(ranks_of(group))}, "
                f"but the layout puts {list(mine)} there. Give groups and sizes that describe the same grid."
            )
        self._remember(axis)
        self._groups.setdefault(mine, group)

    def group(self, axis: Axis) -> ProcessGroup:
        """This rank's group of the axis; the first request makes the groups of the whole axis."""
        self._check()
        mine = axis.group_of(self.rank)
        if len(mine) == self.world and mine not in self._groups:
            return comm.get_world_group()
        if len(mine) == 1 and _can_be_made_alone():
            if mine not in self._groups:
                self._make(mine, axis.name, alone=True)
        elif dist.get_backend() == "fake":
            if not self._is_known(mine):
                self._make(mine, axis.name)
        elif axis.groups not in self._grids:
            for ranks in axis.groups:
                if not self._is_known(ranks):
                    self._make(ranks, axis.name)
            self._remember(axis)
        found = self._groups.get(mine)
        if found is None:
            raise LayoutError(
                f"rank {self.rank} has no group for axis {axis.name!r}, ranks {list(mine)}. "
                "Give every rank the same groups in the same order."
            )
        return found

    def twin(self, axis: Axis, backend: str | None = None) -> ProcessGroup:
        """A further group of the same ranks, made anew by every call: what travels there keeps its own order."""
        self._check()
        mine = axis.group_of(self.rank)
        if dist.get_backend() == "fake":  # torch's pretended ranks have no hosts, and the group itself has no order
            return self.group(axis)
        found = None
        for ranks in axis.groups:
            group = self._create(ranks, axis.name, backend=backend)
            found = group if ranks == mine else found
        if found is None:
            raise LayoutError(f"rank {self.rank} is in no group of axis {axis.name!r}.")
        return found

    def close(self) -> None:
        """Destroy the groups made here, in the order they were made; closing twice is harmless."""
        made, self._made = self._made, []
        self._groups.clear()
        self._grids.clear()
        self._others.clear()
        self.closed = True
        for group in made:
            destroy_group(group)

    def _is_known(self, ranks: Ranks) -> bool:
        """Whether these ranks have a group, on whichever rank this is."""
        return ranks in self._groups or ranks in self._others or any(grid.has(ranks) for grid in self._grids)

    def _remember(self, axis: Axis) -> None:
        """All groups of the axis exist."""
        if not isinstance(axis.groups, GridGroups):
            self._others.update(axis.groups)
        elif axis.groups not in self._grids:
            self._grids.append(axis.groups)

    def _make(self, ranks: Ranks, name: str, *, alone: bool = False) -> None:
        group = self._create(ranks, name, alone=alone)
        if group is not None:
            self._groups[ranks] = group

    def _create(
        self, ranks: Ranks, name: str, *, alone: bool = False, backend: str | None = None
    ) -> ProcessGroup | None:
        group = create_group(ranks, alone=alone, backend=backend, name=name)
        if group is not None:
            self._made.append(group)
            if len(ranks) > 1 and dist.get_backend(group) == dist.Backend.GLOO:
                # gloo returns once this rank's own ends are connected. Closing a group while a slower member still
                # connects would fail there, so its members meet once.
                dist.barrier(group)
                shared_memory.meet(group)
        return group

    def _check(self) -> None:
        if self.closed:
            raise LayoutError("this layout is closed and its groups are gone. Build a new layout.")
        rank, world = rank_and_world()
        if (rank, world) != (self.rank, self.world):
            raise LayoutError(
                f"the layout was made for rank {self.rank} of {self.world}, but this process is rank {rank} of "
                f"{world}. Build the layout after torch.distributed is initialised."
            )
        if not self.alive:
            raise LayoutError(
                "torch.distributed was initialised again since this layout was made, and its groups are gone. "
                "Build a new layout."
            )
        self._home = comm.get_world_group()


def _can_be_made_alone() -> bool:
    """MPI has no partial creation, and a world bound to a device splits its communicator with all ranks."""
    return comm.get_world_group().bound_device_id is None and dist.get_backend() != dist.Backend.MPI
