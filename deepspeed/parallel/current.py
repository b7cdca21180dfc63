"""The current layout, for calls without a handle (`deepspeed.utils.groups`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed import comm
from deepspeed.errors import LayoutError

from .layout import AxisGroup, ExpertGroups, ParallelLayout
from .mpu import layout_from_mpu
from .process_groups import create_group, destroy_group, rank_and_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CurrentLayout", "current_layout"]


class CurrentLayout:
    """One layout and what scripts said about it. Who sets a layout closes it; `reset()` closes what was made here.

    Whatever was set last counts: a layout, a mesh or an mpu (a mesh before an mpu). With nothing set, all ranks of
    the world are data-parallel.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._layout: ParallelLayout | None = None
        self._mpu: Any = None
        self._mesh: DeviceMesh | None = None
        self._own: list[ParallelLayout] = []
        self._world_clone: ProcessGroup | None = None
        self.experts: dict[str, ExpertGroups] = {}
        self.secondary: AxisGroup | None = None
        self.tensor_rank: int | None = None
        self.tensor_size: int | None = None

    def get(self) -> ParallelLayout:
        """The current layout; made from the mesh, the mpu or the world if none was set."""
        layout = self._layout
        if layout is not None and layout.table.alive and self._fits(layout):
            return layout
        if self._mesh is not None:
            layout = ParallelLayout.from_mesh(self._mesh)
        elif self._mpu is not None:
            layout = layout_from_mpu(self._mpu)
        else:
            layout = ParallelLayout.build()
        self._layout = self.keep(layout)
        return layout

    def set(self, layout: ParallelLayout | None) -> None:
        """Make a layout the current one, or forget the current one."""
        self._layout = layout

    def forget(self, layout: ParallelLayout) -> None:
        """Stop using this layout; nothing happens if another one was set since."""
        if self._layout is layout:
            self._layout = None

    def keep(self, layout: ParallelLayout) -> ParallelLayout:
        """Close this layout at `reset()`."""
        self._own.append(layout)
        return layout

    @property
    def is_known(self) -> bool:
        """True if `get()` can answer: something was set, or there is a world."""
        return any(given is not None for given in (self._layout, self._mesh, self._mpu)) or comm.is_initialized()

    @property
    def mpu(self) -> Any:
        """The mpu that a script set."""
        return self._mpu

    @mpu.setter
    def mpu(self, mpu: Any) -> None:
        self._mpu, self._layout = mpu, None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that a script set."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: DeviceMesh | None) -> None:
        self._mesh, self._layout = mesh, None

    def world_clone(self) -> ProcessGroup:
        """A group of its own over all ranks, made once by all ranks together."""
        if self._world_clone is None:
            self._world_clone = create_group(range(rank_and_world()[1]))
        if self._world_clone is None:
            raise LayoutError("this process is not part of its own world. Initialise torch.distributed again.")
        return self._world_clone

    def reset(self) -> None:
        """Forget everything, and destroy the groups that were made here."""
        own, clone = self._own, self._world_clone
        self._clear()
        for layout in own:
            layout.close()
        if clone is not None:
            destroy_group(clone)

    @staticmethod
    def _fits(layout: ParallelLayout) -> bool:
        """False for a layout made before there was a world, of another size; one used without any always fits."""
        return not comm.is_initialized() or rank_and_world() == (layout.rank, layout.grid.world)


current_layout = CurrentLayout()
