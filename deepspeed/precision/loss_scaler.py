"""The loss-scaler classes of DeepSpeed's public API: its attribute names, over the state machine of scale.py.

What a scaler knows is its attributes and nothing else, because checkpoints hold these objects pickled: an object that
is read back, by whichever library it was written, continues exactly where it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.precision.scale import DynamicScale, StaticScale

__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]


class LossScalerBase:
    """A factor on the loss, held in `cur_scale`."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The factor for the next backward."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Learn how a step went."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the factor, in fp32 where the loss is narrower."""
        return StaticScale(self.cur_scale).apply(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        torch.autograd.backward(self.scale_loss(loss), retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A factor that never changes."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A factor that follows the rule of `deepspeed.precision.scale`."""

    _overflows_in_a_row = 0  # what an object has that was pickled by DeepSpeed, which does not count them

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self._machine()  # refuses settings that cannot work, now rather than at the first step

    def update_scale(self, overflow: bool) -> None:
        """Learn how a step went: halve, double or leave the factor."""
        machine = self._machine()
        machine.update(bool(overflow))
        state = machine.state_dict()
        self.cur_scale = state["scale"]
        self.cur_iter = int(state["step"])
        self.last_overflow_iter = int(state["last_overflow"])
        self.cur_hysteresis = int(state["hysteresis_left"])
        self._overflows_in_a_row = int(state["skipped_in_a_row"])

    def _machine(self) -> DynamicScale:
        machine = DynamicScale(
            max(self.cur_scale, self.min_scale),
            self.scale_window,
            self.delayed_shift,
            self.consecutive_hysteresis,
            self.min_scale,
            self.raise_error_at_min_scale,
            factor=self.scale_factor,
        )
        machine.load_state_dict(
            {
                "scale": self.cur_scale,
                "step": self.cur_iter,
                "last_overflow": self.last_overflow_iter,
                "hysteresis_left": self.cur_hysteresis,
                "skipped_in_a_row": self._overflows_in_a_row,
            }
        )
        return machine
