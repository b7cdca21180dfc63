"""The table of config accessors: each row resolves against a real config."""

from __future__ import annotations

from operator import attrgetter

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.runtime.getters import GETTERS


@pytest.mark.parametrize("name", sorted(GETTERS))
def test_every_getter_resolves(name):
    attrgetter(GETTERS[name])(DeepSpeedConfig({"train_batch_size": 1}))
