"""ParallelLayout: the axes of a job, their process groups, and a DeviceMesh view of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from deepspeed import comm
from deepspeed.errors import LayoutError
from deepspeed.parallel import hierarchy
from deepspeed.parallel.axes import (
    AXES,
    GRID_AXES,
    MODEL_AXES,
    SAMPLE_AXES,
    STAGE_AXES,
    Axis,
    AxisRoles,
    ExpertAxes,
    LayoutPlan,
    RankGrid,
    Ranks,
)
from deepspeed.parallel.process_groups import GroupTable, rank_and_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MESH_NAMES = {name: axis for axis, kind in AXES.items() for name in kind.mesh}


class AxisGroup:
    """One axis as this rank sees it: its group, its place in it, and how to split it further."""

    __slots__ = ("_group", "_hosts", "_layout", "_nodes", "axis", "rank", "ranks")

    def __init__(self, layout: ParallelLayout, axis: Axis) -> None:
        self._layout = layout
        self._group: ProcessGroup | None = None
        self._hosts: ProcessGroup | None = None
        self._nodes: tuple[AxisGroup, AxisGroup] | None = None
        self.axis = axis
        self.ranks: Ranks = axis.group_of(layout.rank)
        self.rank: int = self.ranks.index(layout.rank)

    @property
    def name(self) -> str:
        """The axis, or the axes joined by `+`."""
        return self.axis.name

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> ProcessGroup:
        """The process group; made with the whole axis on first use, which all ranks must do in the same order."""
        if self._group is None or not self._layout.table.alive:
            self._group = self._layout.table.group(self.axis)
        return self._group

    def twin(self, backend: str | None = None) -> ProcessGroup:
        """A further group of the same ranks, for what must not wait in line with the rest; all ranks make it together.

        `backend` may differ: "gloo" carries messages of the hosts while devices are busy.
        """
        return self._layout.table.twin(self.axis, backend)

    @property
    def host_group(self) -> ProcessGroup:
        """The group of the hosts of the same ranks, for whatever they say one after the other; made on first use.

        Hosts of all ranks talk over a world of gloo itself, by tags of their own: every group of gloo has a thread
        that wakes up a hundred times a second.
        """
        if self._hosts is None:
            shared = self is self._layout.world and comm.get_backend(self.group) == "gloo"
            self._hosts = self.group if shared else self.twin("gloo")
        return self._hosts

    def split(self, *, intra_node: bool = False, size: int | None = None) -> tuple[AxisGroup, AxisGroup]:
        """(inter, intra): at the borders of nodes with `intra_node=True`, or in runs of `size` neighbours."""
        if intra_node == (size is not None):
            raise LayoutError(
                f"split() of axis {self.name!r} got intra_node={intra_node} and size={size}. Give exactly one."
            )
        if size is not None:
            levels = hierarchy.split(self.axis, size)
        else:
            levels = hierarchy.node_split(self.axis, self._layout.ranks_per_node)
        return self._layout.axis_group(levels.inter), self._layout.axis_group(levels.intra)

    @property
    def nodes(self) -> tuple[AxisGroup, AxisGroup] | None:
        """(inter, intra) once `meet_nodes` found that it spans several nodes; None: it does not, or nobody asked."""
        return self._nodes

    def meet_nodes(self) -> bool:
        """Make groups for exchanges in two hops, if this spans several nodes with as many of its ranks, two or more.

        All ranks call this in the same order. Where the ranks per node are unknown, or differ, nothing is made.
        """
        try:
            inter, intra = self.split(intra_node=True)
        except LayoutError:
            return False
        if inter.size > 1 and intra.size > 1:
            _ = inter.group, intra.group
            self._nodes = inter, intra
        return self._nodes is not None

    def __repr__(self) -> str:
        return f"AxisGroup({self.name!r}, rank {self.rank} of {self.size}, ranks {_brief(self.ranks)})"


class ExpertGroups:
    """The two axes of one expert-parallel size: `["ep"]` and `["edp"]`."""

    __slots__ = ("_hosts", "edp", "ep")

    def __init__(self, ep: AxisGroup, edp: AxisGroup) -> None:
        self.ep = ep
        self.edp = edp
        self._hosts: ProcessGroup | None = None

    @property
    def hosts(self) -> ProcessGroup:
        """A group of the ranks of `ep` that carries host tensors; made on first use, by all ranks in the same order."""
        if self._hosts is None:
            self._hosts = self.ep.twin("gloo")
        return self._hosts

    def __getitem__(self, name: str) -> AxisGroup:
        if name not in ("ep", "edp"):
            raise LayoutError(f"experts have no axis {name!r}; use 'ep' or 'edp'.")
        return self.ep if name == "ep" else self.edp


class ParallelLayout(AxisRoles[AxisGroup]):
    """How the ranks of a job work together: `layout.data`, `layout["dp", "tp"]`, `layout.experts(ep=4)["edp"]`.

    Nothing is created until a group is asked for; see [Note: agreed order] in process_groups.py.
    """

    def __init__(self, plan: LayoutPlan, *, rank: int, per_node: int | None = None) -> None:
        plan.grid.coords(rank)
        self._plan = plan
        self._per_node = per_node
        self._axes: dict[frozenset[str], AxisGroup] = {}
        self._experts: dict[tuple[int, bool, bool], ExpertGroups] = {}
        self._mesh: DeviceMesh | None = None
        self.rank = rank
        self.table = GroupTable(rank, plan.world)

    @classmethod
    def build(
        cls,
        *,
        world: int | None = None,
        dp: int | None = None,
        rank: int | None = None,
        ranks_per_node: int | None = None,
        **sizes: int,
    ) -> ParallelLayout:
        """The layout of this job with these sizes of axes; `world` and `rank` come from torch.distributed."""
        if world is None or (rank is None and world != 1) or comm.is_initialized():
            found_rank, found_world = rank_and_world()
            if (world or found_world) != found_world or (found_rank if rank is None else rank) != found_rank:
                raise LayoutError(
                    f"rank {rank} of world size {world} was asked for, but this process is rank {found_rank} of "
                    f"{found_world}. Leave world and rank out, or use ParallelLayout.plan(world={world})."
                )
            world, rank = found_world, found_rank
        plan = LayoutPlan.fit(world, dp=dp, **sizes)
        return cls(plan, rank=rank or 0, per_node=ranks_per_node)

    @staticmethod
    def plan(*, world: int, dp: int | None = None, **sizes: int) -> LayoutPlan:
        """The rank lists of all groups, without processes and without creating anything."""
        return LayoutPlan.fit(world, dp=dp, **sizes)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, ranks_per_node: int | None = None) -> ParallelLayout:
        """The layout that a DeviceMesh describes; it uses the groups of the mesh and never destroys them."""
        names = _axis_names(mesh)
        ranks = mesh.mesh.flatten().tolist()
        rank, world = rank_and_world()
        if ranks != list(range(world)):
            raise LayoutError(
                f"the mesh holds the ranks {_brief(ranks)}, but a layout needs all {world} ranks of the world in "
                "rising order. Build the mesh with init_device_mesh over the whole world."
            )
        absent = tuple(name for name in GRID_AXES if name not in names)
        grid = RankGrid((*absent, *names), (*(1 for _ in absent), *mesh.mesh.shape))
        layout = cls(LayoutPlan(grid), rank=rank, per_node=ranks_per_node)
        for place, name in enumerate(names):
            layout.table.adopt(grid.axis(name), mesh.get_group(place))
        return layout

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → ranks along it."""
        return self._plan.sizes

    @property
    def coords(self) -> dict[str, int]:
        """Axis → this rank's place along it."""
        return dict(zip(self._plan.grid.names, self._plan.grid.coords(self.rank), strict=True))

    @property
    def grid(self) -> RankGrid:
        """The rank arithmetic underneath."""
        return self._plan.grid

    @property
    def world(self) -> AxisGroup:
        """All ranks, as one group."""
        return self[self._plan.grid.names]

    @property
    def alone(self) -> AxisGroup:
        """The axis of nobody: each rank is a group of its own."""
        return self.axis_group(self._plan.grid.axis())

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: as given to `build`, else from LOCAL_SIZE or LOCAL_WORLD_SIZE."""
        return hierarchy.ranks_per_node(self._plan.world, self._per_node)

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self.table.closed

    def __getitem__(self, names: str | tuple[str, ...]) -> AxisGroup:
        wanted = (names,) if isinstance(names, str) else names
        if "ep" in wanted or "edp" in wanted:
            raise LayoutError("expert axes depend on the expert-parallel size; use layout.experts(ep=…)['ep'].")
        key = frozenset(wanted)
        if len(key) != len(wanted) or key not in self._axes:
            self._axes[key] = AxisGroup(self, self._plan[wanted])
        return self._axes[key]

    def experts(self, ep: int, *, data_first: bool = False, fold_tp: bool = False) -> ExpertGroups:
        """The groups of experts spread over `ep` ranks; the options are those of `LayoutPlan.experts`."""
        key = (ep, data_first, fold_tp)
        if key not in self._experts:
            axes: ExpertAxes = self._plan.experts(ep, data_first=data_first, fold_tp=fold_tp)
            self._experts[key] = ExpertGroups(self.axis_group(axes.ep), self.axis_group(axes.edp))
        return self._experts[key]

    def axis_group(self, axis: Axis) -> AxisGroup:
        """Any further axis over the same world, with groups shared and closed like all others."""
        if axis.world != self._plan.world:
            raise LayoutError(
                f"axis {axis.name!r} covers {axis.world} ranks, but the layout has {self._plan.world}. "
                "Make the axis for the world of this layout."
            )
        return AxisGroup(self, axis)

    def create_groups(self, *axes: str | tuple[str, ...]) -> None:
        """Make the groups of these axes now, so that later some ranks may use them without the others.

        Without arguments, those of each axis and of the combinations that training uses.
        """
        for axis in axes or (*STAGE_AXES, SAMPLE_AXES, MODEL_AXES):
            if self[axis].size > 1:
                _ = self[axis].group

    @property
    def mesh(self) -> DeviceMesh:
        """The same grid and the same groups as a DeviceMesh with the dims pp, dp, sp, tp."""
        if self._mesh is None or not self.table.alive:
            names = self._plan.grid.names
            groups = [self[name].group for name in names]
            ranks = torch.arange(self._plan.world).view(self._plan.grid.sizes)
            make: Callable[..., DeviceMesh] = DeviceMesh.from_group
            self._mesh = make(groups, comm.group_device().type, ranks, mesh_dim_names=names)
        return self._mesh

    def close(self) -> None:
        """Destroy the groups that this layout made; adopted ones and the world stay. Closing twice is harmless."""
        self.table.close()

    def __enter__(self) -> ParallelLayout:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"ParallelLayout({sizes}, rank={self.rank})"


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    given = tuple(mesh.mesh_dim_names or ())
    if len(given) != mesh.mesh.ndim:
        raise LayoutError(
            f"the mesh has {mesh.mesh.ndim} dims without names. Give mesh_dim_names, for example ('dp', 'tp')."
        )
    unknown = [name for name in given if name not in _MESH_NAMES]
    if unknown:
        raise LayoutError(
            f"the mesh dim {unknown[0]!r} is no known axis. Use names of {', '.join(sorted(_MESH_NAMES))}."
        )
    names = tuple(_MESH_NAMES[name] for name in given)
    if len(set(names)) != len(names):
        raise LayoutError(f"two of the mesh dims {list(given)} mean the same axis. Flatten them into one dim.")
    return names


def _brief(ranks: Ranks | list[int]) -> str:
    shown = list(ranks[:8])
    return str(shown) if len(ranks) <= 8 else f"{shown[:-1]}… {len(ranks)} in all"
