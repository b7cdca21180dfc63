"""deepspeed.utils.groups in one process: names, answers before there is a world, assignments, errors."""

from __future__ import annotations

from unittest import mock

import pytest

from deepspeed.errors import DeepSpeedError, LayoutError
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.mpu import current_layout
from deepspeed.utils import groups


@pytest.fixture(autouse=True)
def _fresh_slot():
    current_layout.reset()
    yield
    current_layout.reset()


def names(pattern: str) -> list[str]:
    """`get_{a,b}_rank` → both names."""
    before, _, rest = pattern.partition("{")
    if not rest:
        return [pattern]
    choices, _, after = rest.partition("}")
    return [name for choice in choices.split(",") for name in names(before + choice + after)]


@pytest.mark.parametrize(
    "pattern",
    [
        "get_{data,model,tensor_model}_parallel_{group,rank,world_size}",
        "get_tensor_model_parallel_src_rank",
        "set_tensor_model_parallel_{rank,world_size}",
        "initialize",
        "_create_{model_parallel,expert_and_data_parallel,expert_data_and_model_parallel}",
        "_get_expert_{,data_}parallel_{group,rank,world_size,group_ranks}",
        "_get_{data,sequence,sequence_data}_parallel_{group,rank,world_size}",
        "_get_max_expert_size{,_name}",
        "_get_model_parallel_world_size",
        "_create_zero_param_parallel_group",
        "_get_zero_param_intra_parallel_{group,group_world_size,rank_in_mygroup,group_ranks}",
        "_get_{local_all_to_all_group,expert_parallel_ranks}",
        "_clone_world_group",
    ],
)
def test_names_that_clients_call_exist(pattern):
    for name in names(pattern):
        assert callable(getattr(groups, name)), name


def test_known_expert_ranks():
    ep, edp = groups._get_expert_parallel_ranks(
        world_size=16, tensor_parallel_size_=2, expert_parallel_size_=4, pipeline_parallel_size_=1
    )
    assert ep == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert edp == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]
    swapped, _ = groups._get_expert_parallel_ranks(16, 2, 4, use_data_before_expert_parallel_=True)
    assert swapped[0] == [0, 4, 8, 12]


def test_initialize_refuses_with_advice():
    with pytest.raises(groups.DeprecatedException, match=r"ep_size=4 to deepspeed\.moe.layer.MoE") as error:
        groups.initialize(ep_size=4)
    assert isinstance(error.value, DeepSpeedError)


def test_before_there_is_a_world_nothing_is_split_and_data_is_unknown():
    assert groups._get_sequence_parallel_world_size() == 1
    assert groups._get_sequence_parallel_rank() == 0
    assert groups.get_model_parallel_world_size() == groups._get_model_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_world_size() == 1
    with pytest.raises(LayoutError, match="not initialised"):
        groups._get_data_parallel_world_size()
    with pytest.raises(LayoutError, match="not initialised"):
        groups._get_data_parallel_group()


def test_answers_come_from_the_current_layout():
    current_layout.set(ParallelLayout.build(world=16, pp=2, sp=2, tp=2, rank=11))
    assert groups.get_data_parallel_world_size() == 2
    assert groups._get_data_parallel_group_ranks() == [11, 15]
    assert groups.get_model_parallel_world_size() == 4
    assert groups.get_tensor_model_parallel_rank() == 1
    assert groups.get_tensor_model_parallel_src_rank() == 10
    assert groups._get_sequence_parallel_rank() == 1
    assert groups._get_sequence_data_parallel_world_size() == 4
    assert groups._get_sequence_data_parallel_rank() == 1
    assert groups._get_broadcast_src_rank() == 9


def test_tensor_parallel_rank_and_size_can_be_set():
    groups.set_tensor_model_parallel_rank(3)
    groups.set_tensor_model_parallel_world_size(8)
    assert groups.get_tensor_model_parallel_rank() == 3
    assert groups.get_tensor_model_parallel_world_size() == 8
    current_layout.reset()
    assert groups.get_tensor_model_parallel_world_size() == 1


def test_assigning_mpu_and_mesh_takes_effect_and_is_undone():
    assert groups.mpu is None
    with mock.patch.object(groups, "mpu", "patched"):
        assert current_layout.mpu == "patched"
    assert groups.mpu is None
    marker = object()
    groups.mpu = marker
    assert current_layout.mpu is marker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "mpu", "patched")
        assert current_layout.mpu == "patched"
    assert groups.mpu is marker
    groups.mesh_device = "mesh"
    assert current_layout.mesh == "mesh"
    current_layout.reset()
    assert groups.mpu is None
    assert groups.mesh_device is None


def test_a_closed_layout_is_no_longer_current():
    layout = ParallelLayout.build(world=1)
    current_layout.set(layout)
    assert current_layout.get() is layout
    layout.close()
    with pytest.raises(LayoutError, match="not initialised"):
        current_layout.get()


def test_questions_before_the_groups_exist():
    assert groups._get_max_expert_size() is None
    with pytest.raises(LayoutError, match="no expert groups 'ep_size_2'; there are none"):
        groups._get_expert_parallel_world_size("ep_size_2")
    assert not groups._zero_param_parallel_is_initialized()
    with pytest.raises(LayoutError, match="zero_hpz_partition_size"):
        groups._get_zero_param_intra_parallel_group()
