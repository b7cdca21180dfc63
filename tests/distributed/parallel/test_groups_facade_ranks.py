"""deepspeed.utils.groups on real ranks: defaults, a set layout, an assigned mpu or mesh, experts, hpZ, reset."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deepspeed.errors import LayoutError
from deepspeed.parallel import LayoutMpu, ParallelLayout
from deepspeed.parallel.mpu import current_layout
from deepspeed.utils import groups
from tests.harness import ranks, store_path


def members(group) -> list[int]:
    return dist.get_process_group_ranks(group)


@ranks(2)
def test_with_nothing_set_the_world_is_data_parallel():
    assert groups._get_data_parallel_group() is dist.group.WORLD
    assert groups.get_data_parallel_rank() == dist.get_rank()
    assert groups._get_data_parallel_world_size() == 2
    assert groups._get_sequence_data_parallel_group() is dist.group.WORLD
    for size in ("_get_sequence_parallel", "get_model_parallel", "get_tensor_model_parallel"):
        assert getattr(groups, f"{size}_world_size")() == 1
        assert getattr(groups, f"{size}_rank")() == 0
        assert members(getattr(groups, f"{size}_group")()) == [dist.get_rank()]


@ranks(4)
def test_a_set_layout_answers():
    with ParallelLayout.build(sp=2, tp=2) as layout:
        current_layout.set(layout)
        assert groups._get_sequence_parallel_group() is layout["sp"].group
        assert groups.get_tensor_model_parallel_group() is layout["tp"].group
        assert groups.get_model_parallel_group() is layout["tp"].group
        assert groups._get_data_parallel_world_size() == 1
        current_layout.reset()
        assert not layout.closed
    assert groups._get_data_parallel_world_size() == 4


@ranks(4)
def test_an_assigned_mpu_takes_effect():
    with ParallelLayout.build(tp=2) as layout:
        assert groups._get_data_parallel_world_size() == 4
        groups.mpu = LayoutMpu(layout)
        assert groups._get_data_parallel_group() is layout["dp"].group
        assert groups.get_model_parallel_group() is layout["tp"].group
        assert groups.get_tensor_model_parallel_src_rank() == dist.get_rank() // 2 * 2
        groups.mpu = None
        assert groups._get_data_parallel_world_size() == 4


@ranks(4)
def test_an_assigned_mesh_takes_effect():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "sequence_parallel"))
    groups.mesh_device = mesh
    assert groups._get_data_parallel_group() is mesh.get_group("data_parallel")
    assert groups._get_sequence_parallel_group() is mesh.get_group("sequence_parallel")
    assert groups._get_sequence_parallel_rank() == dist.get_rank() % 2
    assert groups._get_sequence_data_parallel_world_size() == 4
    current_layout.reset()
    dist.barrier(group=mesh.get_group("data_parallel"))


@ranks(4)
def test_expert_groups_by_name():
    rank = dist.get_rank()
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(4)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(groups._get_expert_parallel_group("ep_size_2")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == rank % 2
    assert groups._get_expert_data_parallel_rank("ep_size_2") == rank // 2
    assert groups._get_expert_data_parallel_world_size("ep_size_4") == 1
    assert groups._get_expert_broadcast_src_rank("ep_size_2") == rank % 2
    assert groups._get_max_expert_size() == 4
    assert groups._get_max_expert_size_name() == "ep_size_4"
    assert set(groups._get_expert_parallel_group_dict()) == {"ep_size_2", "ep_size_4"}
    value = torch.tensor(10**rank)
    dist.all_reduce(value, group=groups._get_expert_data_parallel_group("ep_size_2"))
    assert value == (1010 if rank % 2 else 101)
    with pytest.raises(LayoutError, match="one rank order"):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
    with pytest.raises(LayoutError, match="size 3 does not divide the 4 ranks"):
        groups._create_expert_and_data_parallel(3)


@ranks(4)
def test_experts_of_a_tensor_parallel_mpu():
    rank = dist.get_rank()
    with ParallelLayout.build(tp=2) as layout:
        groups._create_expert_data_and_model_parallel(2, LayoutMpu(layout))
        assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
        assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
        current_layout.reset()
        groups.mpu = LayoutMpu(layout)
        groups._create_expert_and_data_parallel(4)
        assert groups._get_expert_parallel_group_ranks("ep_size_4") == [0, 1, 2, 3]


@ranks(4)
def test_secondary_shards_are_neighbours():
    rank = dist.get_rank()
    groups._create_zero_param_parallel_group(2)
    assert groups._zero_param_parallel_is_initialized()
    assert groups._get_zero_param_intra_parallel_group_ranks() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(groups._get_zero_param_intra_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_zero_param_intra_parallel_group_world_size() == 2
    assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank % 2
    groups._create_zero_param_parallel_group(64)
    assert groups._get_zero_param_intra_parallel_group() is dist.group.WORLD
    with pytest.raises(LayoutError, match="zero_hpz_partition_size 3"):
        groups._create_zero_param_parallel_group(3)


@ranks(4)
def test_two_hop_groups_follow_the_nodes():
    rank = dist.get_rank()
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    os.environ["LOCAL_SIZE"] = "2"
    found = groups._get_local_all_to_all_group()
    assert set(found) == {f"local_{rank // 2}", f"global_{rank % 2}"}
    assert members(found[f"local_{rank // 2}"]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(found[f"global_{rank % 2}"]) == [rank % 2, rank % 2 + 2]
    os.environ["LOCAL_SIZE"] = "4"
    assert groups._get_local_all_to_all_group() == {"local_0": dist.group.WORLD}


@ranks(4)
def test_model_parallel_groups_on_request():
    rank = dist.get_rank()
    data, model = groups._create_model_parallel(2)
    assert members(model) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(data) == [rank % 2, rank % 2 + 2]


@ranks(2)
def test_reset_destroys_what_was_made_and_a_new_world_is_noticed():
    clone = groups._clone_world_group()
    assert clone is groups._clone_world_group()
    assert clone is not dist.group.WORLD
    assert members(clone) == [0, 1]
    single = groups._get_sequence_parallel_group()
    dist.barrier()
    current_layout.reset()
    known = dist.distributed_c10d._world.pg_map
    assert clone not in known
    assert single not in known
    assert groups._get_data_parallel_world_size() == 2
    dist.barrier()
    dist.destroy_process_group()
    rank = current_layout._layout.rank
    dist.init_process_group("gloo", init_method=f"file://{store_path()}.2", rank=rank, world_size=2)
    assert groups._get_data_parallel_group() is dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert groups._get_data_parallel_world_size() == 1
    assert groups._get_data_parallel_group() is dist.group.WORLD
