"""Groups, ranks, meshes."""

import gc
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.errors import CommError, LayoutError
from tests.harness import ranks


@ranks(3)
def test_ranks_and_groups():
    warnings.simplefilter("error")
    assert dist.is_available()
    assert dist.is_initialized()
    assert dist.get_world_size() == 3
    assert dist.get_rank() == dist.get_local_rank() == td.get_rank()
    assert dist.get_world_group() is td.group.WORLD
    assert dist.get_all_ranks_from_group() == [0, 1, 2]
    group = dist.new_group([0, 2])
    inside = td.get_rank() in (0, 2)
    assert dist.get_world_size(group) == (2 if inside else -1)
    assert dist.get_rank(group) == {0: 0, 1: -1, 2: 1}[td.get_rank()]
    assert dist.get_global_rank(None, 2) == 2
    if inside:
        assert dist.get_all_ranks_from_group(group) == [0, 2] == dist.get_process_group_ranks(group)
        assert dist.get_global_rank(group, 1) == 2
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.barrier()
    assert dist.get_backend() == "gloo"
    assert dist.group_device() == torch.device("cpu")


@ranks(2)
def test_torch_keywords_of_new_group():
    group = dist.new_group(ranks=[0, 1], timeout=timedelta(seconds=50), backend="gloo", group_desc="mine")
    assert group.group_desc == "mine"
    assert dist.new_group((0, 1)) is not None
    assert dist.get_world_size(dist.new_group()) == 2


@ranks(2)
def test_a_bad_group_is_explained():
    with pytest.raises(CommError, match=r"new_group failed on rank"):
        dist.new_group([0, 7])


@ranks(2)
def test_groups_can_end_through_torch():
    """A group that ends behind our back leaves nothing, and its successor counts from one."""
    for _ in range(3):
        group = td.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        assert dist.recent_operations()[-1].sequence == 1
        td.destroy_process_group(group)
        del group
        gc.collect()
    assert len(dist.dispatcher._states) == 0


@ranks(2)
def test_mesh():
    mesh = dist.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel"))
    assert mesh.mesh_dim_names == ("data_parallel", "sequence_parallel")
    assert mesh.get_group("data_parallel").size() == 2
    with pytest.raises(LayoutError, match="product is 2"):
        dist.initialize_mesh_device((2, 2), ("a", "b"))
    with pytest.raises(LayoutError, match="one name per axis"):
        dist.initialize_mesh_device((2, 1), ("a",))


@ranks(1)
def test_symmetric_memory_needs_cuda():
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cuda":
        pytest.skip("there is CUDA here")
    with pytest.raises(CommError, match="CUDA"):
        dist.enable_symm_mem_for_group("0")
