"""Elastic batch sizes: the published values, the rules that define them, and their effect on a config."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.elasticity import (
    ElasticityConfig,
    best_candidate,
    candidate_batch_sizes,
    elastic_batch,
    elastic_sizes,
    valid_gpus,
)
from deepspeed.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize

MICROS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def section(**values):
    return ElasticityConfig(**{"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], **values})


def test_published_values():
    plan = elastic_batch(section(version=0.1), None)
    assert (plan.train, len(plan.valid)) == (1680, 32)
    wide = section(
        version=0.1, max_train_batch_size=10000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500
    )
    plan = elastic_batch(wide, None)
    assert (plan.train, len(plan.valid)) == (9792, 23)


@given(st.integers(1, 3000), MICROS, st.integers(1, 30), st.integers(1, 3000))
def test_valid_numbers_are_those_that_divide(batch, micros, fewest, most):
    wanted = [
        gpus
        for gpus in range(fewest, min(most, batch) + 1)
        if any(batch % micro == 0 and (batch // micro) % gpus == 0 for micro in micros)
    ]
    assert valid_gpus(batch, micros, fewest, most) == wanted


@given(MICROS, st.integers(1, 5000))
def test_candidates_are_multiples_within_the_limit(bases, most):
    found = candidate_batch_sizes(bases, most)
    assert len(found) <= len({base for base in bases if base <= most})
    assert all(size <= most and any(size % base == 0 for base in bases) for size in found)
    # Doubling would pass the limit: no highly composite number is skipped by a factor of 2.
    for base in bases:
        if base <= most:
            assert any(size % base == 0 and size * 2.5 > most for size in found)


def test_ties():
    assert best_candidate([4, 8], [4, 8], 1, 1, True).train == 8
    assert best_candidate([4, 8], [4, 8], 1, 1, False).train == 4
    assert best_candidate([4], [4], 5, 9, True) is None
    assert best_candidate([], [4], 1, 9, True) is None


@given(
    MICROS,
    st.integers(40, 4000),
    st.sampled_from([0.1, 0.2]),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (8, 1), (8, 2), (4, 4)]),
    st.integers(1, 64),
)
def test_a_plan_holds_on_every_rank_count_that_it_names(micros, most, version, larger, node, nodes):
    per_node, parallel = node if version == 0.2 else (1, 1)
    plan = section(
        version=version,
        micro_batch_sizes=micros,
        max_train_batch_size=most,
        prefer_larger_batch=larger,
        num_gpus_per_node=per_node,
        model_parallel_size=parallel,
    )
    ranks = nodes * per_node // parallel
    try:
        train, micro, steps = elastic_sizes(plan, ranks)
    except ElasticityIncompatibleWorldSize:
        if version == 0.2:
            assert min(micros) * ranks > most
        return
    assert train == micro * steps * ranks <= most
    assert micro in micros
    for other in elastic_batch(plan, ranks * parallel).valid:
        again = elastic_sizes(plan, other)
        assert again[0] == train == math.prod(again[1:]) * other


def test_version_2_makes_a_batch_for_the_gpus_there_are():
    plan = section(max_train_batch_size=100, micro_batch_sizes=[4, 6])
    assert 13 not in elastic_batch(plan, 1).valid
    assert elastic_sizes(plan, 13) == (78, 6, 1)
    assert elastic_sizes(plan.model_copy(update={"prefer_larger_batch": False}), 13) == (52, 4, 1)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"26 GPUs .* at least 104 samples"):
        elastic_sizes(plan, 26)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="does not run on 13"):
        elastic_sizes(plan.model_copy(update={"version": 0.1}), 13)
    with pytest.raises(ElasticityConfigError, match="no batch of at most 100"):
        elastic_batch(section(version=0.1, max_train_batch_size=100, min_gpus=99, max_gpus=99), None)


CONFIG = {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}}


@pytest.mark.parametrize(
    ("ranks", "wanted"), [(1, (1680, 6, 280)), (4, (1680, 6, 70)), (7, (1680, 6, 40)), (11, (1980, 6, 30))]
)
def test_the_section_decides_the_batch(ranks, wanted):
    config = DeepSpeedConfig(CONFIG, world_size=ranks)
    found = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert found == wanted


def test_given_batch_keys_are_refused_or_ignored():
    with pytest.raises(ValueError, match="elasticity computes the batch sizes"):
        DeepSpeedConfig({**CONFIG, "train_batch_size": 8})
    ignoring = {"elasticity": {**CONFIG["elasticity"], "ignore_non_elastic_batch_info": True}, "train_batch_size": 8}
    assert DeepSpeedConfig(ignoring, world_size=2).train_batch_size == 1680


def test_what_a_scheduler_planned_with_must_not_change(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**CONFIG["elasticity"], "min_time": 3}))
    assert DeepSpeedConfig(CONFIG, world_size=2).train_batch_size == 1680
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**CONFIG["elasticity"], "micro_batch_sizes": [2]}))
    with pytest.raises(ElasticityConfigError, match="the scheduler planned with"):
        DeepSpeedConfig(CONFIG, world_size=2)
