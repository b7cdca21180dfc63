"""Updates in whole vectors: only where all sizes are multiples of 16, and with the same numbers."""

from __future__ import annotations

import pytest
import torch

from .interpreted import numbers

from deepspeed.ops.adam import ONE_PASS  # isort: skip
from deepspeed.ops.adam import AdamRule
from deepspeed.ops.kernels import many
from deepspeed.ops.optimizer import ParameterBatch
from deepspeed.ops.precompile import launch


@pytest.mark.parametrize(("sizes", "expected"), [((64, 528), True), ((64, 530), False), ((16, 1), False)])
def test_sizes_decide(monkeypatch, sizes, expected):
    given = []

    def noted(kernel, grid, *args, **options):
        given.append(options["ALIGNED"])
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(many, "launch_kernel", noted)
    # torch's allocators give addresses that are multiples of 16
    made = [[numbers(size, seed=row) for size in sizes] for row in range(4)]
    params, grads, first, second = made
    second = [each.abs_() for each in second]
    batch, other = (
        ParameterBatch(
            3, tuple([each.clone() for each in row] for row in (first, second)), [p.clone() for p in params], grads
        )
        for _ in range(2)
    )
    ONE_PASS.triton(batch, AdamRule(1e-2))
    ONE_PASS.reference(other, AdamRule(1e-2))
    assert given == [expected]
    for one, two in zip(batch.params, other.params, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
