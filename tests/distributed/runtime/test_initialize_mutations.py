"""Damaged configs through `deepspeed.initialize`: its own errors or an engine, and `config check` says the same.

`DS_TEST_CONFIGS=10000` sets the number of configs; seeds make each of them repeatable by its number.
"""

from __future__ import annotations

import logging
import os
import random

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed._assemble.trial import verdict
from deepspeed.config.load import load
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.log import logger
from tests.harness import ranks
from tests.models import Tiny
from tests.mutations import TRAINABLE, VALID, mutate

COUNT = int(os.environ.get("DS_TEST_CONFIGS", "600"))
WORLDS = (1, 2)
PARTS = 4


def damaged(number):
    """Every third is one with many sections; the others are small, and reach further."""
    rng = random.Random(number)
    return mutate(rng.choice(VALID), rng) if number % 3 == 0 else mutate(rng.choice(TRAINABLE), rng, most=2)


def refusal(config):
    """What `initialize` says against a config, or None."""
    try:
        deepspeed.initialize(model=Tiny(), config=config)[0].destroy()
    except DeepSpeedError as error:
        return error
    return None


def problems(config, world):
    """What `config check` says against it."""
    try:
        return verdict(load(config, partial=True), world).problems
    except DeepSpeedConfigError as error:
        return [str(error)]


def judged_alike(config, error, found):
    """Whether both say yes or both say no, but for what a file alone cannot know."""
    if error is None:
        # Without an optimizer a schedule is not built; a script may bring one.
        optimizer = config.get("optimizer") or {}
        return not found or (optimizer.get("type") is None and all("scheduler" in each for each in found))
    waits_for_a_client = 'still "auto"' in str(error)
    return bool(found) or waits_for_a_client or "parameter groups" in str(error)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", WORLDS)
@ranks(1, init=False, timeout=600)
def test_damaged_configs(world, part, tmp_path):
    os.chdir(tmp_path)  # monitors write into the working directory
    logger.setLevel(logging.CRITICAL)
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    trained = 0
    for number in range(world * 10**6 + part, world * 10**6 + COUNT // len(WORLDS), PARTS):
        config = damaged(number)
        try:
            error = refusal(config)
            found = problems(config, world)
        except Exception as raw:
            raise AssertionError(f"config {number} raised {raw!r}: {config}") from raw
        trained += error is None
        assert judged_alike(config, error, found), f"config {number}: {error!r}, but check says {found}: {config}"
    assert trained > COUNT // len(WORLDS) // PARTS // 20, "too few configs train for this to show anything"
