"""Megatron's model-parallel unit (mpu) as a layout and back, and the current layout, for calls without a handle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from deepspeed import comm
from deepspeed.errors import LayoutError
from deepspeed.parallel.axes import AXES, GRID_AXES, MODEL_AXES, SAMPLE_AXES, LayoutPlan, RankGrid
from deepspeed.parallel.layout import AxisGroup, ExpertGroups, ParallelLayout
from deepspeed.parallel.process_groups import create_group, destroy_group, rank_and_world, ranks_of
from deepspeed.parallel.topology import PipelineParallelGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# axes -> the X of get_X_parallel_{rank,group,world_size}, in the order they are tried
_COMBINED: dict[tuple[str, ...], tuple[str, ...]] = {SAMPLE_AXES: ("sequence_data",), MODEL_AXES: ("model",)}
_SINGLE: dict[tuple[str, ...], tuple[str, ...]] = {(name,): kind.mpu for name, kind in AXES.items()}
_SPELLINGS = {**_SINGLE, **_COMBINED}


def layout_from_mpu(mpu: Any, *, ranks_per_node: int | None = None) -> ParallelLayout:
    """The layout that an mpu describes; its groups are used as they are and never destroyed.

    Sizes that the mpu does not tell follow from the world size. An mpu without a data-parallel size (the one of
    Ulysses sequence parallelism) has dp = world / sp. All ranks must call this together.
    """
    rank, world = rank_and_world()
    sizes = _sizes(mpu, world)
    groups = {name: _group(mpu, name, size, world) for name, size in sizes.items()}
    grid = _grid(sizes, groups, world)
    layout = ParallelLayout(LayoutPlan(grid), rank=rank, per_node=ranks_per_node)
    for name, group in groups.items():
        if group is not None:
            layout.table.adopt(grid.axis(name), group)
    _adopt_combined(layout, mpu, world)
    _compare_ranks(layout, mpu)
    return layout


class LayoutMpu:
    """A layout in the shape of an mpu, for code that expects one.

    It has `get_X_parallel_group()`, `…_rank()`, `…_world_size()` and `…_src_rank()` for every X that an mpu may use.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout

    def __getattr__(self, name: str) -> Callable[[], Any]:
        spelling, _, what = name.removeprefix("get_").partition("_parallel_")
        axes = next((axes for axes, spellings in _SPELLINGS.items() if spelling in spellings), None)
        if axes is None or what not in _FACTS or not name.startswith("get_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda: _FACTS[what](self.layout[axes])


_FACTS: dict[str, Callable[[AxisGroup], Any]] = {
    "group": lambda axis: axis.group,
    "rank": lambda axis: axis.rank,
    "world_size": lambda axis: axis.size,
    "src_rank": lambda axis: axis.ranks[0],
}


def tensor_group(mpu: Any) -> ProcessGroup:
    """The ranks that share layers, of an mpu of any age."""
    found = _ask(mpu, (*AXES["tp"].mpu, "model"), "group")
    if not isinstance(found, dist.ProcessGroup):
        raise LayoutError(
            f"{type(mpu).__name__} is no mpu with tensor-parallel ranks: its get_tensor_model_parallel_group gives "
            f"{found!r}. Let it return a torch.distributed process group."
        )
    return found


def stage_of(mpu: Any) -> tuple[int, int]:
    """(the pipeline stage of this rank, how many there are); (0, 1) where the mpu does not know stages."""
    size = _ask(mpu, AXES["pp"].mpu, "world_size")
    return (0, 1) if size is None else (int(_ask(mpu, AXES["pp"].mpu, "rank") or 0), int(size))


def _ask(mpu: Any, spellings: tuple[str, ...], what: str) -> Any:
    """What the first method `get_<spelling>_parallel_<what>` of the mpu answers; None if it has none of them."""
    for spelling in spellings:
        method = getattr(mpu, f"get_{spelling}_parallel_{what}", None)
        if method is not None:
            return method()
    return None


def _sizes(mpu: Any, world: int) -> dict[str, int]:
    told = {name: _ask(mpu, AXES[name].mpu, "world_size") for name in GRID_AXES}
    pp, sp = int(told["pp"] or 1), int(told["sp"] or 1)
    model = _ask(mpu, ("model",), "world_size")
    tp, dp = told["tp"], told["dp"]
    if tp is None:
        if model is not None and model % pp:
            raise LayoutError(
                f"the mpu's model-parallel size {model} is not divisible by its pipeline size {pp}. "
                "Model-parallel ranks are stages × tensor slices; correct the mpu."
            )
        tp = model // pp if model is not None else 1 if dp is None else world // (pp * int(dp) * sp)
    if dp is None:
        return LayoutPlan.fit(world, pp=pp, sp=sp, tp=int(tp)).sizes
    sizes = {"pp": pp, "dp": int(dp), "sp": sp, "tp": int(tp)}
    if math.prod(sizes.values()) != world:
        terms = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise LayoutError(
            f"the mpu's sizes {terms} = {math.prod(sizes.values())} do not make up the world size {world}. "
            "Initialise the mpu for this job, or give it the methods get_pipeline_model_parallel_world_size, "
            "get_sequence_parallel_world_size and get_tensor_model_parallel_world_size."
        )
    return sizes


def _group(mpu: Any, name: str, size: int, world: int) -> ProcessGroup | None:
    """The mpu's own group for an axis; an axis of one rank, or of all ranks, may do without."""
    model_is_tensor = name == "tp" and _ask(mpu, AXES["pp"].mpu, "world_size") in (None, 1)
    spellings = (*AXES[name].mpu, "model") if model_is_tensor else AXES[name].mpu
    # A grid would make the group of one rank now, and every group of gloo has a thread that wakes up all the time.
    if size == 1 and (name != "dp" or isinstance(mpu, PipelineParallelGrid)):
        return None
    return _process_group(_ask(mpu, spellings, "group"), name, size, world)


def _process_group(group: Any, name: str, size: int, world: int) -> ProcessGroup | None:
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(
            f"the mpu's group for axis {name!r} is a {type(group).__name__} for {size} of {world} ranks. "
            "Its get_…_parallel_group methods must return torch.distributed process groups."
        )
    if group.size() != size:
        raise LayoutError(
            f"the mpu's group for axis {name!r} has {group.size()} ranks, but its size is given as {size}. "
            "Let the mpu's sizes and groups agree."
        )
    return group


def _grid(sizes: dict[str, int], groups: dict[str, ProcessGroup | None], world: int) -> RankGrid:
    """The grid in which the mpu's groups lie: an axis is the slower the farther apart its neighbours are.

    An axis whose group is not known keeps its usual distance, or goes behind a known one of the same distance.
    """
    usual = RankGrid(GRID_AXES, tuple(sizes[name] for name in GRID_AXES))
    distances = dict(zip(usual.names, usual.strides, strict=True))
    told = {name: group for name, group in groups.items() if group is not None and sizes[name] > 1}
    for name, group in told.items():
        first, second, *_ = ranks_of(group)
        distances[name] = second - first
    order = sorted(GRID_AXES, key=lambda name: (-distances[name], name in told))
    grid = RankGrid(tuple(order), tuple(sizes[name] for name in order))
    assert grid.world == world, "sizes were checked against the world"
    return grid


def _adopt_combined(layout: ParallelLayout, mpu: Any, world: int) -> None:
    for axes, (spelling,) in _COMBINED.items():
        axis = layout.grid.axis(*axes)
        told = _ask(mpu, (spelling,), "world_size")
        if told is not None and told != axis.size:
            raise LayoutError(
                f"the mpu's {spelling} parallel size is {told}, but its other sizes make {axis.name} {axis.size}. "
                "Let the mpu's sizes agree."
            )
        if axis.size > 1:
            group = _process_group(_ask(mpu, (spelling,), "group"), axis.name, axis.size, world)
            if group is not None:
                layout.table.adopt(axis, group)


def _compare_ranks(layout: ParallelLayout, mpu: Any) -> None:
    for axes, spellings in _SPELLINGS.items():
        told = _ask(mpu, spellings, "rank")
        if told is not None and told != layout[axes].rank:
            raise LayoutError(
                f"rank {layout.rank}: the mpu's {spellings[0]} parallel rank is {told}, but its sizes "
                f"{layout.sizes} put this process at {layout[axes].rank}. Let the mpu's ranks and sizes agree."
            )


class CurrentLayout:
    """One layout and what scripts said about it. Who sets a layout closes it; `reset()` closes what was made here.

    Whatever was set last counts: a layout, a mesh or an mpu (a mesh before an mpu). With nothing set, all ranks of
    the world are data-parallel.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._layout: ParallelLayout | None = None
        self.mpu: Any = None
        """The mpu that a script set."""
        self.mesh: DeviceMesh | None = None
        """The mesh that a script set."""
        self._own: list[ParallelLayout] = []
        self._world_clone: ProcessGroup | None = None
        self.experts: dict[str, ExpertGroups] = {}
        self.secondary: AxisGroup | None = None
        self.tensor_rank: int | None = None
        self.tensor_size: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("mpu", "mesh"):
            self._layout = None  # it came from another one
        super().__setattr__(name, value)

    def get(self) -> ParallelLayout:
        """The current layout; made from the mesh, the mpu or the world if none was set."""
        layout = self._layout
        if layout is not None and layout.table.alive and self._fits(layout):
            return layout
        if self.mesh is not None:
            layout = ParallelLayout.from_mesh(self.mesh)
        elif self.mpu is not None:
            layout = layout_from_mpu(self.mpu)
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
        return any(given is not None for given in (self._layout, self.mesh, self.mpu)) or comm.is_initialized()

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
