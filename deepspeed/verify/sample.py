"""`SampledUpdate`: one parameter in one step, from the gradients of each rank to its new value, and what is wrong.

The judgement is pure: a running job and `replay` use the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.verify.copies import Finding, bits, first_of
from deepspeed.verify.formulas import updated

_NORM_ROUNDING = 1e-4
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepFacts:
    """What holds for all parameters of a step."""

    step: int
    applied: bool = False
    norm: float | None = None
    """As the step reported it; None where it reports none."""
    plain_norm: float | None = None
    """As it was measured a second time."""
    clipping: float = 0.0

    @property
    def factor(self) -> float:
        """What clipping multiplies gradients by."""
        if self.clipping <= 0 or self.norm is None:
            return 1.0
        return min(self.clipping / (self.norm + _CLIP_EPSILON), 1.0)

    def judge(self, rank: int) -> Finding | None:
        """The finding where the norm is wrong."""
        norm, plain = self.norm, self.plain_norm
        if norm is None or plain is None or not torch.isfinite(torch.tensor([norm, plain])).all():
            return None
        if abs(norm - plain) <= _NORM_ROUNDING * plain + 1e-30:
            return None
        return Finding(rank, "the norm of the gradients", norm, plain, "a second measurement of the reduced gradients")


@dataclass
class SampledUpdate:
    """What happened to one parameter in one step, as whole tensors."""

    name: str
    owners: tuple[tuple[int, int, int], ...]
    """(first element, end, rank) of the parts; one entry where each rank has all of it."""
    ranks: tuple[int, ...] = ()
    """Those whose gradients are summed."""
    weight: float = 1.0
    """The sum of the gradients of all ranks is multiplied by this."""
    rounding: float = 0.0
    """The relative error that a reduction may have."""
    smallest: float = 0.0
    """The absolute one."""
    total: Tensor | None = None
    """Gradients of all ranks and backwards, summed in float64, and the sum of their sizes: [2, elements]."""
    gradient: Tensor | None = None
    """As the optimizer receives it, before clipping; None where there was none."""
    formula: str | None = None
    """The update rule; None: the update is not computed again."""
    options: dict[str, Any] = field(default_factory=dict)
    step: int = 1
    """Of this parameter, counted by the optimizer."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Master (`parameter`) and moments before the update."""
    after: dict[str, Tensor] = field(default_factory=dict)

    def judge(self, facts: StepFacts) -> Finding | None:
        """The first difference on the way from gradients to the new value; None if there is none."""
        return self._judge_gradient() or self._judge_update(facts)

    def _owner(self, element: int) -> int:
        return next((rank for begin, end, rank in self.owners if begin <= element < end), self.owners[0][2])

    def _finding(self, wrong: Tensor, found: Tensor, expected: Tensor, what: str, source: str) -> Finding | None:
        if not bool(wrong.any()):
            return None
        element, shape = int(wrong.reshape(-1).to(torch.uint8).argmax()), tuple(found.shape)
        return first_of(
            wrong, found, expected, rank=self._owner(element), tensor=f"{what} {self.name}", source=source, shape=shape
        )

    def _judge_gradient(self) -> Finding | None:
        if self.total is None or self.gradient is None:
            return None
        found, (total, size) = self.gradient.double().reshape(-1), self.total
        expected = total * self.weight
        room = self.rounding * size * abs(self.weight) + self.smallest
        finite = expected.isfinite() & size.isfinite()
        wrong = finite & ~((found - expected).abs() <= room)
        shape = self.gradient.shape
        return self._finding(
            wrong.view(shape), self.gradient, expected.view(shape), "the reduced gradient of", "a plain sum over ranks"
        )

    def _judge_update(self, facts: StepFacts) -> Finding | None:
        if self.formula is None or not self.after:
            return None
        if not facts.applied or self.gradient is None:
            for key, found in self.after.items():
                if key in self.before:
                    wrong = bits(found) != bits(self.before[key])
                    finding = self._finding(wrong, found, self.before[key], _called(key), "a step that was not taken")
                    if finding is not None:
                        return finding
            return None
        states = {key: value for key, value in self.before.items() if key != "parameter"}
        gradient = self.gradient.double() * facts.factor
        results = updated(self.formula, self.before["parameter"], gradient, states, self.step, self.options)
        for key, result in results.items():
            if key not in self.after:
                continue
            found = self.after[key]
            wrong = result.differs(found, torch.finfo(found.dtype).eps)
            finding = self._finding(wrong, found, result.value, _called(key), f"the formula of {self.formula}")
            if finding is not None:
                return finding
        return None


def _called(key: str) -> str:
    return "the updated" if key == "parameter" else f"{key} of"
