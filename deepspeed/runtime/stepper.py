"""The optimizer step as one readable list: reduce, measure, judge, clip, update, publish."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.multi_tensor import scale_
from deepspeed.precision.scale import LossScale
from deepspeed.runtime.backward import Backward
from deepspeed.runtime.gradients import GradientReducer
from deepspeed.runtime.masters import Masters
from deepspeed.runtime.norm import clip_coefficient, total_norm

__all__ = ["Outcome", "Stepper"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an optimizer step."""

    applied: bool
    grad_norm: Tensor | float | None
    """Before clipping, without the loss scale."""
    scale_before: float
    scale_after: float


@dataclass(frozen=True)
class Stepper:
    """Takes one optimizer step with what the backward passes left."""

    optimizer: Optimizer
    masters: Masters
    reducer: GradientReducer
    backward: Backward
    scale: LossScale
    check_overflow: bool
    clipping: float
    model_group: Any
    is_split: Callable[[nn.Parameter], bool]
    """True for parameters of which each rank of `model_group` holds a different part."""

    def step(self) -> Outcome:
        """Reduce what is not reduced yet, then update, or skip where a gradient is inf or NaN."""
        self.reducer.finish()
        self.masters.take_gradients()
        gradients = list(self.masters.gradients())
        norm = self._norm(gradients)
        before = self.scale.value
        known = self._known(norm)
        overflow = self.check_overflow and known is not None and not math.isfinite(known)
        if not overflow:
            self._prepare([grad for _, grad in gradients], norm, known)
            self.optimizer.step()
            self.masters.publish()
        self.zero_grad()
        self.scale.update(overflow)
        return Outcome(not overflow, norm if known is None else known, before, self.scale.value)

    def zero_grad(self) -> None:
        """Drop every gradient."""
        self.masters.zero_grad()
        self.backward.forget()

    def _norm(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> Tensor:
        if self.model_group is None:
            norm = total_norm([grad for _, grad in gradients], [])
        else:
            split = [grad for param, grad in gradients if self.is_split(param)]
            shared = [grad for param, grad in gradients if not self.is_split(param)]
            norm = total_norm(shared, split, self.model_group)
        return norm if self.backward.unit == 1.0 else norm * self.backward.unit

    def _known(self, norm: Tensor) -> float | None:
        """The norm as a number, where waiting for it costs nothing or is needed anyway."""
        if self.check_overflow or norm.device.type == "cpu":
            return float(norm)
        return None

    def _prepare(self, gradients: list[Tensor], norm: Tensor, known: float | None) -> None:
        """Bring gradients to their true size and clip them, in one multiplication."""
        unit = self.backward.unit
        if self.clipping <= 0:
            if unit != 1.0:
                scale_(gradients, unit)
            return
        coefficient = clip_coefficient(norm, self.clipping)
        if known is None:
            scale_(gradients, coefficient if unit == 1.0 else coefficient * unit)
            return
        factor = float(coefficient) * unit
        if factor != 1.0:
            with torch.no_grad():
                scale_(gradients, factor)
