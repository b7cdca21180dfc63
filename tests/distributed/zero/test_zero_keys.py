"""Keys of the section change how ZeRO works, and not what comes out."""

from __future__ import annotations

import pytest

from tests.closeness import assert_same_training
from tests.harness import ranks
from tests.user_models import Checkpointed, run

KEYS = [
    {"reduce_scatter": False},
    {"overlap_comm": False},
    {"overlap_comm": True},
    {"contiguous_gradients": False},
    {"round_robin_gradients": True},
    {"parameter_alignment": True},
    {"allgather_bucket_size": 20},
    {"reduce_bucket_size": 10**9},
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
    {"sub_group_size": 30},
]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: ",".join(keys))
@ranks(2)
def test_a_key_changes_how_and_not_what(keys):
    expected = run(Checkpointed, 0)
    for stage in (1, 2, 3):
        assert_same_training(run(Checkpointed, stage, zero=keys), expected)
