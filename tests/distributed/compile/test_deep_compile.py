"""DeepCompile trains as plain PyTorch does: every stage, both backends, models as users bring them."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_same_training
from tests.harness import ranks
from tests.user_models import MODELS, run

DEEP = {"compile": {"deepcompile": True}}


def compiled(backend="eager", **kwargs):
    """Compile in front of the first step."""

    def each(step, engine):
        if step == 0:
            torch._dynamo.reset()
            engine.compile(backend=backend, **kwargs)
            assert engine.is_deepcompile_active()

    return each


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS.keys())
@ranks(2)
def test_models(kind):
    expected = run(kind, 0)
    for stage in (1, 2, 3):
        assert_same_training(run(kind, stage, config=DEEP, each=compiled()), expected)
