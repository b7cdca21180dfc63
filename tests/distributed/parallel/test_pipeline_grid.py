"""PipelineParallelGrid on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import LayoutError
from deepspeed.parallel.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from tests.harness import ranks


def members(group) -> list[int]:
    return dist.get_process_group_ranks(group)


@ranks(4)
def test_stages_and_replicas():
    rank = dist.get_rank()
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=2))
    assert grid.topology().get_dim("pipe") == 2
    assert grid.get_global_rank() == rank
    assert grid.get_stage_id() == grid.get_pipe_parallel_rank() == rank // 2
    assert grid.get_data_parallel_id() == grid.get_data_parallel_rank() == rank % 2
    assert grid.get_pipe_parallel_world_size() == grid.get_pipeline_model_parallel_world_size() == 2
    assert grid.get_data_parallel_world_size() == 2
    assert members(grid.get_pipe_parallel_group()) == grid.pp_group == [rank % 2, rank % 2 + 2]
    assert members(grid.get_data_parallel_group()) == grid.get_data_parallel_group_ranks()
    assert grid.dp_group == [rank // 2 * 2, rank // 2 * 2 + 1]
    # No tensor slices: the ranks with the same data index are exactly one pipeline, and share its group.
    assert grid.get_model_parallel_group() is grid.get_pipe_parallel_group()
    assert grid.get_model_parallel_rank() == rank // 2
    assert grid.get_model_parallel_world_size() == 2
    assert members(grid.get_slice_parallel_group()) == [rank]
    assert (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()) == (0, 1)
    assert (grid.is_first_stage, grid.is_last_stage) == (rank < 2, rank >= 2)
    value = torch.tensor(10**rank)
    dist.all_reduce(value, group=grid.dp_proc_group)
    assert value == (1100 if rank >= 2 else 11)
    grid.close()


@ranks(4)
def test_slices():
    rank = dist.get_rank()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2))
    assert members(grid.get_slice_parallel_group()) == members(grid.get_model_parallel_group())
    assert grid.get_slice_parallel_rank() == grid.get_tensor_model_parallel_rank() == rank % 2
    assert grid.get_tensor_model_parallel_world_size() == 2
    assert members(grid.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert grid.slice_proc_group is grid.get_slice_parallel_group()
    grid.close()


@ranks(4)
def test_neighbouring_stages_are_found_by_coordinates():
    rank = dist.get_rank()
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
    assert grid.stage_to_global(0) == rank % 2
    assert grid.stage_to_global(1) == rank % 2 + 2
    assert grid.stage_to_global(stage_id=1, data=0) == 2
    with pytest.raises(ValueError, match="2 of axis 'pipe' is out of range"):
        grid.stage_to_global(2)
    grid.close()


@ranks(2, 4)
def test_default_topology_is_balanced():
    grid = PipelineParallelGrid(process_group=dist.group.WORLD)
    assert grid.pipe_parallel_size == 2
    assert grid.data_parallel_size == dist.get_world_size() // 2
    grid.close()


@ranks(2)
def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match="pipe 2 × data 2 has 4 ranks, but the world size is 2"):
        PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
    groups = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(LayoutError, match="a grid spans all 2 ranks"):
        PipelineParallelGrid(process_group=groups[dist.get_rank()])
