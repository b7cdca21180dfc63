"""The factor on the loss: none, fixed, or adapting to overflows; a state machine that needs no tensor.

[Note: the dynamic rule] One rule for every stage, stage 0 included, where DeepSpeed ignores hysteresis and never gives
up. With S the scale, h the hysteresis left, i the index of the step and `last` that of the last overflow (-1 at first):

    overflow:  if h is 1: S = max(S / 2, minimum), or an error if S is the minimum already; otherwise h falls by 1
               last = i
    clean:     with consecutive hysteresis h is refilled
               n = i - last - 1, the clean steps before this one; if n > 0 and n is a multiple of the window:
               h is refilled and S doubles
    both:      i grows by 1

So the first doubling happens at step index = window, and without consecutive hysteresis every overflow after the first
halving halves again, until a doubling refills h. Doubling stops at 2^127: the next power of two is infinity in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SCALE = 2.0**127
"""The largest power of two that fp32 holds."""


class LossScaleError(DeepSpeedError, RuntimeError):
    """Gradients overflow although the loss scale is as low as it may be, or saved scale state cannot be used."""


class LossScale:
    """What the loss is multiplied by before backward, and gradients are divided by after it; here a fixed factor."""

    dynamic = False
    """True if `update` may change the factor."""
    overridden: float | None = None
    """The factor that a script set; None if it set none."""

    def __init__(self, value: float = 1.0) -> None:
        self._scale = float(value)

    def override(self, value: float) -> None:
        """Use this factor from the next backward on; it does not adapt any more."""
        _positive("an external loss scale", value)
        self.overridden = self._scale = float(value)

    @property
    def value(self) -> float:
        """The factor for the next backward."""
        return self._scale

    def apply(self, loss: Tensor) -> Tensor:
        """`loss` times the factor; the same tensor where that is 1."""
        if self._scale == 1:
            return loss
        # 65536 is infinite in fp16, and so would be most products with it.
        wide = loss if loss.element_size() >= 4 else loss.float()
        return wide * self._scale

    def update(self, overflow: bool) -> None:
        """Learn how a step went; called once per optimizer step, with the same answer on every rank."""

    def state_dict(self) -> dict[str, float | int]:
        """What a resumed run needs, as plain numbers; settings are not part of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue from `state`; what another kind of scale has saved changes nothing."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NoScale(LossScale):
    """The loss as it is."""


class StaticScale(LossScale):
    """A factor that never changes, whatever was saved: a step that overflows is skipped, and that is all."""

    def __init__(self, value: float) -> None:
        _positive("a static loss scale", value)
        super().__init__(value)

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self._scale}

    def __repr__(self) -> str:
        return f"StaticScale({self._scale:g})"


class DynamicScale(LossScale):
    """A factor that halves on overflows and doubles after a window of clean steps: see [Note: the dynamic rule]."""

    dynamic = True

    def __init__(
        self,
        init: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
        raise_at_minimum: bool = True,
        *,
        factor: float = 2.0,
    ) -> None:
        _positive("the initial loss scale", init)
        _positive("the minimum loss scale", minimum)
        _at_least_one("the loss-scale window", window)
        _at_least_one("hysteresis", hysteresis)
        if init < minimum:
            raise DeepSpeedConfigError(
                f"the loss scale would begin at {init:g}, below its minimum of {minimum:g}; begin higher, or lower the "
                "minimum"
            )
        if not 1 < factor < math.inf:
            raise DeepSpeedConfigError(f"the loss scale changes by a factor above 1, found {factor}")
        super().__init__(init)
        self.window = int(window)
        self.hysteresis = int(hysteresis)
        self.consecutive_hysteresis = bool(consecutive_hysteresis)
        self.minimum = float(minimum)
        self.raise_at_minimum = bool(raise_at_minimum)
        self.factor = float(factor)
        self._hysteresis_left = self.hysteresis
        self._step = 0
        self._last_overflow = -1
        self._skipped_in_a_row = 0

    def update(self, overflow: bool) -> None:
        if self.overridden is not None:
            return
        if overflow:
            self._overflowed()
        else:
            self._clean()
        self._step += 1

    def _overflowed(self) -> None:
        self._skipped_in_a_row += 1
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif self._scale > self.minimum:
            self._scale = max(self._scale / self.factor, self.minimum)
        elif self.raise_at_minimum:
            raise LossScaleError(self._why_it_ends())
        self._last_overflow = self._step

    def _clean(self) -> None:
        self._skipped_in_a_row = 0
        clean_before = self._step - self._last_overflow - 1
        grows = clean_before > 0 and clean_before % self.window == 0
        if grows or self.consecutive_hysteresis:
            self._hysteresis_left = self.hysteresis
        if grows and self._scale * self.factor <= LARGEST_SCALE:
            self._scale *= self.factor

    def _why_it_ends(self) -> str:
        count = self._skipped_in_a_row
        steps = "1 step was" if count == 1 else f"{count} steps in a row were"
        return (
            f"{steps} skipped because gradients held inf or NaN, and the loss scale, {self._scale:g}, is at its "
            f"minimum, {self.minimum:g}: every later step would be skipped too. Usual causes: a learning rate that is "
            "too high or a warmup that is too short, inf or NaN in the data or in the loss itself, weights that are "
            "NaN already, or activations beyond 65504, the largest number of fp16. Check the last batches and losses, "
            "lower the learning rate, clip gradients (gradient_clipping), or train in bf16 (bf16.enabled), which "
            "needs no loss scale."
        ) + (" If the gradients are merely large, lower fp16.min_loss_scale." if self.minimum > 1 else "")

    def state_dict(self) -> dict[str, float | int]:
        return {
            "scale": self._scale,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "hysteresis_left": self._hysteresis_left,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        if set(state) <= {"scale"}:
            return  # from a scale that was not dynamic: there is no history to continue
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise LossScaleError(
                f"the saved loss-scale state has {', '.join(sorted(state))} but not {', '.join(missing)}; it was not "
                "saved by a dynamic loss scale of this library, leave it out to begin with the initial scale"
            )
        _positive("the saved loss scale", state["scale"])
        self._scale = min(max(float(state["scale"]), self.minimum), LARGEST_SCALE)
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])
        # The config may have changed since: never more than a full measure, never less than one overflow.
        self._hysteresis_left = min(max(int(state["hysteresis_left"]), 1), self.hysteresis)
        self._skipped_in_a_row = int(state["skipped_in_a_row"])

    def __repr__(self) -> str:
        return (
            f"DynamicScale({self._scale:g}, window={self.window}, hysteresis={self._hysteresis_left} of "
            f"{self.hysteresis}, minimum={self.minimum:g})"
        )


def _positive(what: str, value: float) -> None:
    if not 0 < value <= LARGEST_SCALE:
        raise DeepSpeedConfigError(f"{what} is a number above 0 that fp32 can hold (at most 2^127), found {value}")


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise DeepSpeedConfigError(f"{what} is a whole number of at least 1, found {value}")
