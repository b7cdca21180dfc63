"""Any mutation of a valid config either loads or raises DeepSpeedConfigError, never anything else."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed import log as ds_logging
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import load
from deepspeed.errors import DeepSpeedConfigError
from tests.mutations import NAMES, VALID, mutate


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setattr(ds_logging.logger, "warning", lambda *args: None)


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_mutations(seed):
    rng = random.Random(seed)
    loaded = 0
    for _ in range(500):
        config = mutate(rng.choice(VALID), rng)
        for build in (DeepSpeedConfig, lambda source: load(source, partial=True)):
            try:
                build(config)
                loaded += 1
            except DeepSpeedConfigError:
                pass
    assert loaded > 20, "the mutations must leave some configs valid, or this test shows nothing"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), anything, max_size=6))
def test_any_json_object(config):
    with contextlib.suppress(DeepSpeedConfigError):
        DeepSpeedConfig(config)
