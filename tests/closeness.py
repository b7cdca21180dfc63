"""How near two trainings have to be that are the same but for rounding; nowhere else is that stated.

[Note: equal bits] A kernel rounds the body of a tensor, in vectors, otherwise than its last few elements, and a product
of matrices otherwise if they begin elsewhere in memory. So where a tensor is cut, by another stage, another number of
ranks or another bucket, and whether plain PyTorch computes it, decides about last bits, on some processors more than on
others. Runs that cut alike, such as one that is repeated or resumed, have equal bits, and are compared with
`torch.equal`.

What rounding becomes: Adam divides by the size of the gradient, so that the error of a step is a share of the step, not
of the weight, and is compared with how far training went. Where a gradient is zero but for rounding, such as that of a
bias in front of a norm, nothing of a step is certain: tests of such models give Adam an `eps` above that noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

__all__ = ["Training", "assert_same_training"]


@dataclass(frozen=True)
class Near:
    """What rounding may change, of a model whose narrowest parameters have a dtype."""

    number: float
    """Of a loss or a norm, which may itself be of that dtype."""
    value: float
    """Of a parameter's value: one rounding to its dtype."""
    way: float
    """Of the farthest way that any parameter went."""


# Several times what is seen if every weight and moment is moved by a last bit in every step.
NEAR = {
    torch.float32: Near(number=1e-5, value=1e-6, way=2e-4),
    torch.float16: Near(number=3e-3, value=2**-10, way=0.05),
    torch.bfloat16: Near(number=2e-2, value=2**-7, way=0.05),
}


@dataclass(frozen=True)
class Training:
    """Parameters before and after, by name, and the losses and gradient norms of the steps where they are known."""

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    losses: Sequence[float] = ()
    norms: Sequence[float] = ()


def assert_same_training(found: Training, expected: Training) -> None:
    """The same parameters, losses and norms but for rounding, and something was trained."""
    near = NEAR[min((value.dtype for value in expected.after.values()), key=lambda dtype: torch.finfo(dtype).bits)]
    ways = [(value - expected.before[name]).abs().max() for name, value in expected.after.items() if value.numel()]
    farthest = torch.stack([way.double() for way in ways]).max().item()
    assert farthest > 0, "nothing was trained"
    assert list(found.losses) == pytest.approx(list(expected.losses), rel=near.number)
    assert list(found.norms) == pytest.approx(list(expected.norms), rel=near.number)
    assert found.after.keys() == expected.after.keys()
    for name, value in expected.after.items():
        torch.testing.assert_close(
            found.after[name],
            value,
            rtol=NEAR[value.dtype].value,
            atol=near.way * farthest,
            msg=lambda text, name=name: f"{name}: {text}",
        )
