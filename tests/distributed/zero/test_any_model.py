"""Models as users bring them: every stage gives what stage 0 gives."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_same_training
from tests.harness import shared_ranks
from tests.user_models import MODELS, Two, run


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", list(MODELS))
@shared_ranks(2)
def test_a_model(name):
    optimizer = sgd if name == "Sparse" else None
    expected = run(MODELS[name], 0, steps=3, optimizer=optimizer)
    for stage in (1, 2, 3):
        assert_same_training(run(MODELS[name], stage, steps=3, optimizer=optimizer), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(2)
def test_what_is_unfrozen_later_trains(precision):
    def each(step, engine):
        engine.module.first.requires_grad_(step != 0)
        engine.module.second.requires_grad_(step != 2)

    config = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    expected = run(Two, 0, each=each, config=config)
    assert not torch.equal(expected.after["first.weight"], expected.before["first.weight"])
    for stage in (1, 2, 3):
        assert_same_training(run(Two, stage, each=each, config=config), expected)
