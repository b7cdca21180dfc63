"""The ranks over which a model is sharded while it is constructed, before there is an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from deepspeed import comm
from deepspeed.errors import LayoutError, UsageError
from deepspeed.parallel import AxisGroup, ParallelLayout, layout_from_mpu
from deepspeed.parallel.current import current_layout
from deepspeed.parallel.process_groups import create_group, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GivenAxis", "construction_axis"]


class GivenAxis(AxisGroup):
    """The ranks of a process group that somebody else made."""

    __slots__ = ()

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._hosts = group, None
        self.ranks = ranks_of(group)
        self.rank = self.ranks.index(comm.get_rank())

    @property
    def name(self) -> str:
        """It has no axis to be named after."""
        return "given"

    @property
    def group(self) -> ProcessGroup:
        """The process group itself."""
        assert self._group is not None, "it was given"
        return self._group

    def twin(self, backend: str | None = None) -> ProcessGroup:
        """A further group of the same ranks; its members make it together."""
        group = create_group(self.ranks, alone=True, backend=backend)
        assert group is not None, "this rank is a member"
        return group

    def split(self, *, intra_node: bool = False, size: int | None = None) -> tuple[AxisGroup, AxisGroup]:
        """Not of a bare group."""
        raise LayoutError(f"a bare process group of the ranks {list(self.ranks)} cannot be split; use a layout")


def construction_axis(group: Any, mpu: Any, *, on_hosts: bool) -> AxisGroup:
    """The ranks of a group, else the data-parallel ranks of an mpu, else all ranks.

    `on_hosts` asks for a group that carries host tensors, whatever the devices are.
    """
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"zero.Init: the given group is a {type(group).__name__}; a torch.distributed process group that this "
                "rank is a member of is expected"
            )
        axis: AxisGroup = GivenAxis(group)
    elif mpu is not None:
        axis = current_layout.keep(layout_from_mpu(mpu))["dp", "sp"]
    else:
        axis = ParallelLayout.build()["dp", "sp"]
    if on_hosts and axis.size > 1 and dist.get_backend(axis.group) != dist.Backend.GLOO:
        return GivenAxis(axis.twin("gloo"))
    return axis
