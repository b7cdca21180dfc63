"""ProcessTopology and PipelineParallelGrid: the public classes of pipeline scripts, over the rank arithmetic."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from deepspeed.errors import LayoutError
from deepspeed.parallel.axes import A, Axis, RankGrid
from deepspeed.parallel.process_groups import GroupTable, rank_and_world, ranks_of

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


class ProcessTopology:
    """Ranks in row-major order over named axes, the last axis fastest: `ProcessTopology(["a", "b"], [2, 3])`."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.grid = RankGrid(tuple(self.axes), tuple(self.dims))
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]

    @functools.cached_property
    def mapping(self) -> dict[Any, int]:
        """Coordinate → rank."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate, which must name every axis; for some of the axes use `filter_match`."""
        return self.grid.rank(coord_kwargs)

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A name for the rank as used in checkpoint files, like `model_01`; omitted axes do not appear."""
        coord = zip(self.axes, self.grid.coords(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{place:02d}" for axis, place in coord if axis not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """Ranks along the axis, 0 if there is no such axis."""
        return self.grid.size(axis) if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of the rank, a namedtuple with one field for each axis."""
        return self.ProcessCoord(*self.grid.coords(rank))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ only in this axis; none if there is no such axis."""
        if axis not in self.axes:
            return []
        return [list(group) for group in self.grid.axis(axis).groups]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """All ranks that have the given coordinates."""
        return self.grid.where(filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks at place `idx` of the axis."""
        return self.grid.where({axis: idx})

    def world_size(self) -> int:
        """The number of ranks."""
        return self.grid.world

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages × data-parallel replicas; replicas of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages × data-parallel replicas × tensor slices; slices of one replica are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


_GridMethod = Callable[["PipelineParallelGrid"], A]


def _methods(name: str) -> tuple[_GridMethod[int], _GridMethod[int], _GridMethod[ProcessGroup]]:
    """Rank, world size and group of one way to group the ranks."""

    def rank(self: PipelineParallelGrid) -> int:
        return self._axes[name].group_of(self.global_rank).index(self.global_rank)

    def world_size(self: PipelineParallelGrid) -> int:
        return self._axes[name].size

    def group(self: PipelineParallelGrid) -> ProcessGroup:
        return self._group(name)

    return rank, world_size, group


class PipelineParallelGrid:
    """A topology with its process groups, in the shape of an mpu.

    "Model parallel" are all ranks that hold one copy of the model, with the same place in the data and in a sequence;
    "slice parallel" are those along the `model` axis, and those along an axis `sequence` share sequences. The groups
    are made here by all ranks together; groups of one rank are made when asked for.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: ProcessGroup | None = None) -> None:
        self.global_rank, self.world_size = rank_and_world()
        if process_group is not None and ranks_of(process_group) != tuple(range(self.world_size)):
            raise LayoutError(
                f"the process group holds the ranks {list(ranks_of(process_group))}, but a grid spans all "
                f"{self.world_size} ranks of the world. Leave process_group out."
            )
        self._topo = _balanced(self.world_size) if topology is None else topology
        if self._topo.world_size() != self.world_size:
            sizes = " × ".join(f"{a} {d}" for a, d in zip(self._topo.axes, self._topo.dims, strict=True))
            raise LayoutError(
                f"the topology {sizes} has {self._topo.world_size()} ranks, but the world size is "
                f"{self.world_size}. Start {self._topo.world_size()} processes, or change the topology."
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.sequence_parallel_size = max(self._topo.get_dim("sequence"), 1)
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._axes = _grid_axes(self._topo)
        self._table = GroupTable(self.global_rank, self.world_size)
        self._groups = {name: self._table.group(axis) for name, axis in self._axes.items() if axis.size > 1}
        self._describe_groups()

    def _describe_groups(self) -> None:
        """Rank lists under the names that pipeline scripts read."""
        mine = {name: list(axis.group_of(self.global_rank)) for name, axis in self._axes.items()}
        self.ds_model_rank = mine["ds_model"].index(self.global_rank)
        self.ds_model_world_size = len(mine["ds_model"])
        self.dp_group, self.pp_group, self.slice_group = mine["data"], mine["pipe"], mine["model"]

    @functools.cached_property
    def dp_groups(self) -> list[list[int]]:
        """The ranks of every data-parallel group; listed when asked for, as what follows: it is the whole world."""
        return [list(group) for group in self._axes["data"].groups]

    @functools.cached_property
    def pipe_groups(self) -> list[list[int]]:
        """The ranks of every pipeline."""
        return [list(group) for group in self._axes["pipe"].groups]

    def close(self) -> None:
        """Destroy the groups that this grid made."""
        self._groups.clear()
        self._table.close()

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank that holds stage `stage_id` at this rank's other coordinates, or at those given."""
        coord = {**self._coord(), "pipe": stage_id, **kwargs}
        return self._topo.get_rank(**coord)

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self._coord().get("pipe", 0)

    def get_data_parallel_id(self) -> int:
        """The number of the replica that this rank works for."""
        return self._coord().get("data", 0)

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    get_pipe_parallel_rank, get_pipe_parallel_world_size, get_pipe_parallel_group = _methods("pipe")
    get_data_parallel_rank, get_data_parallel_world_size, get_data_parallel_group = _methods("data")
    get_model_parallel_rank, get_model_parallel_world_size, get_model_parallel_group = _methods("ds_model")
    get_slice_parallel_rank, get_slice_parallel_world_size, get_slice_parallel_group = _methods("model")
    get_sequence_parallel_rank, get_sequence_parallel_world_size, get_sequence_parallel_group = _methods("sequence")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    # The groups under the attribute names that pipeline scripts read.
    ds_model_proc_group = property(get_model_parallel_group)
    dp_proc_group = property(get_data_parallel_group)
    pp_proc_group = property(get_pipe_parallel_group)
    slice_proc_group = property(get_slice_parallel_group)

    def _group(self, name: str) -> ProcessGroup:
        if name not in self._groups:
            self._groups[name] = self._table.group(self._axes[name])
        return self._groups[name]

    def _coord(self) -> dict[str, int]:
        coord: dict[str, int] = self._topo.get_coord(self.global_rank)._asdict()
        return coord


def _grid_axes(topology: ProcessTopology) -> dict[str, Axis]:
    """The ways in which a grid groups its ranks, in the order in which the groups are made."""
    grid = topology.grid
    alone = grid.axis()
    others = [name for name in grid.names if name not in ("data", "sequence")]
    axes = {"ds_model": grid.axis(*others) if others else alone}
    for name in ("data", "pipe", "model", "sequence"):
        axes[name] = grid.axis(name) if name in grid.names else alone
    return axes


def _balanced(world: int) -> PipeDataParallelTopology:
    """The default: the prime factors of the world go to pipe and data in turn, smallest first."""
    sizes, turn, factor = [1, 1], 0, 2
    while world > 1:
        if world % factor:
            factor += 1
            continue
        sizes[turn % 2] *= factor
        world //= factor
        turn += 1
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
