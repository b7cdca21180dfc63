"""The loss-scaler classes of DeepSpeed's public API: its attribute names, over the state machine of scale.py.

What a scaler knows is its attributes and nothing else, because checkpoints hold these objects pickled: an object that
is read back, by whichever library it was written, continues exactly where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.scale import DynamicScale, StaticScale

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"]


@torch.no_grad()
def has_overflow(tensors: Iterable[Tensor | None]) -> Tensor:
    """A 0-dim bool tensor, True if any element is inf or NaN; on the first tensor's device, False for an empty list.

    Dtypes, devices and layouts may be mixed; None and integer tensors are passed over. Nothing here waits for the
    device, except for sparse gradients that are not coalesced and for lists that span devices.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        if each is not None and (each.is_floating_point() or each.is_complex()):
            dense = _elements(each)
            group = groups.setdefault((dense.device, dense.dtype), [])
            if dense.numel():
                group.append(dense)
    device = next(iter(groups))[0] if groups else torch.device("cpu")
    found = [torch.isfinite(_extremes(group)).all().logical_not() for group in groups.values() if group]
    if not found:
        return torch.zeros((), dtype=torch.bool, device=device)
    return found[0] if len(found) == 1 else torch.stack([each.to(device) for each in found]).any()


def _elements(tensor: Tensor) -> Tensor:
    """The elements to look at, as a dense real tensor."""
    if tensor.layout != torch.strided:
        # Entries of one index add up, in fp16 perhaps to infinity: their sum is the gradient.
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _extremes(tensors: list[Tensor]) -> Tensor:
    """Values that are all finite exactly if all elements of the tensors, of one device and dtype, are.

    The greatest magnitude of a tensor says so and cannot itself overflow, as a sum or a 2-norm could. On the CPU the
    least and the greatest element are found several times faster than the magnitude.
    """
    if tensors[0].device.type == "cpu":
        return torch.stack([value for each in tensors for value in torch.aminmax(each)])
    return torch.stack(list(torch._foreach_norm(tensors, math.inf)))


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
        return bool(has_overflow(param.grad for param in params))


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
