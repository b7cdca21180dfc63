"""Keys of the section change how ZeRO works, and not what comes out."""

from __future__ import annotations

import pytest

from tests.closeness import assert_same_training
from tests.harness import shared_ranks
from tests.user_models import Checkpointed, run

AT_ANY_STAGE = [
    {"reduce_scatter": False},
    {"overlap_comm": False},
    {"overlap_comm": True},
    {"contiguous_gradients": False},
    {"round_robin_gradients": True},
    {"parameter_alignment": True},
    {"allgather_bucket_size": 20},
    {"reduce_bucket_size": 10**9},
    {"sub_group_size": 30},
]
AT_STAGE_3 = [
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_prefetch_bucket_size": 10**9},
    {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    {"stage3_max_live_parameters": 60, "stage3_max_reuse_distance": 10**9},
    {"stage3_max_reuse_distance": 10**9},
    {"stage3_param_persistence_threshold": 10},
    {"stage3_param_persistence_threshold": 10**9},
    {"stage3_param_persistence_threshold": 10**9, "stage3_model_persistence_threshold": 60},
    {"stage3_use_all_reduce_for_fetch_params": True},
    {"stage3_allgather_sequential": True},
    {"stage3_module_granularity_threshold": 10**6},
    {"leaf_module": {"classes": ["torch.nn.modules.container.Sequential"]}},
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(2)
def test_a_key_changes_how_and_not_what(stage):
    expected = run(Checkpointed, 0, steps=3)
    for keys in AT_ANY_STAGE + (AT_STAGE_3 if stage == 3 else []):
        found = run(Checkpointed, stage, steps=3, zero=keys)
        try:
            assert_same_training(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{keys}: {error}") from error
