"""The loss-scaler classes of DeepSpeed's public API: its attribute names, over the state machine of scale.py.

What a scaler knows is its attributes and nothing else, because checkpoints hold these objects pickled: an object that
is read back, by whichever library it was written, continues exactly where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.overflow import has_overflow as any_overflow
from deepspeed.precision.scale import DynamicScale, StaticScale

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"]


class LossScalerBase:
    """A factor on the loss, held in `cur_scale`."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The factor for the next backward."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Any], grad_out: Any) -> tuple[Any, ...]:
        """A backward hook of modules: the gradients of the inputs times the factor."""
        return tuple(None if grad is None else self.cur_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Learn how a step went."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the factor, in fp32 where the loss is narrower."""
        return StaticScale(self.cur_scale).apply(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        torch.autograd.backward(self.scale_loss(loss), retain_graph=retain_graph)

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """True if a gradient of `params` holds inf or NaN; waits for the device."""
        return bool(any_overflow(param.grad for param in params))


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

    def has_overflow_serial(self, params: Iterable[Any]) -> bool:
        """True if a gradient of `params` on this rank holds inf or NaN."""
        return self.has_overflow(params)

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


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScaler | DynamicLossScaler:
    """The scaler for a training dtype: only fp16 scales the loss; the arguments are those of DynamicLossScaler."""
    if dtype != torch.float16:
        return LossScaler(scale=1.0)
    if not dynamic_scaling:
        return LossScaler(scale=static_loss_scale)
    if dynamic_loss_args is None:
        raise DeepSpeedConfigError(
            "CreateLossScaler: dynamic_scaling is True but dynamic_loss_args is None; give a dict with init_scale, "
            "scale_window, min_scale, delayed_shift and consecutive_hysteresis"
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
