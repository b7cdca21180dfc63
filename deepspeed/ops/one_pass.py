"""What a step does besides, in the same pass over memory.

The one who holds states sets `optimizer.one_pass` before `step()`: gradients then come from where they arrived, in the
dtype they arrived in, unscaled and clipped by one factor, and the updated parameters also go to where the model reads
them, rounded on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed.errors import UsageError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class OnePass:
    """What a step does besides its update; tensors are found by the identity of their parameter."""

    factor: float = 1.0
    """Gradients are multiplied by this first, those of `.grad` too: unscaling and clipping in one."""

    grads: Mapping[Tensor, Tensor] = field(default_factory=dict)
    """Gradients in place of `.grad`: float32, bfloat16 or float16, as many elements as their parameter, in order."""

    outs: Mapping[Tensor, Tensor] = field(default_factory=dict)
    """Where the updated parameter is written as well, rounded to nearest: what the model computes with."""

    def gradient(self, param: Tensor) -> Tensor | None:
        """The gradient of a parameter, in its shape."""
        grad = self.grads.get(param)
        return param.grad if grad is None else grad.view(param.shape)

    def out(self, param: Tensor) -> Tensor | None:
        """Where the updated parameter goes as well, in its shape."""
        out = self.outs.get(param)
        return None if out is None else out.view(param.shape)

    def check(self, param: Tensor) -> None:
        """Refuse tensors that cannot stand for the gradient or for a copy of `param`."""
        for name, tensors in (("grads", self.grads), ("outs", self.outs)):
            tensor = tensors.get(param)
            if tensor is None:
                continue
            fits = tensor.numel() == param.numel() and tensor.is_contiguous() and tensor.device == param.device
            if not fits or tensor.dtype not in _DTYPES:
                layout = "" if tensor.is_contiguous() else "not contiguous "
                raise UsageError(
                    f"OnePass.{name} has a {layout}{tensor.dtype} tensor of {tensor.numel()} elements on "
                    f"{tensor.device} for a parameter of shape {tuple(param.shape)} on {param.device}; it must be "
                    f"contiguous, on the same device, of {param.numel()} elements, and float32, bfloat16 or float16"
                )


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the device decides while it updates, so that the host need not wait for it: float32 scalars there."""

    divisor: Tensor
    """Gradients are divided by this first; they are used up, in place or not."""
    skip: Tensor
    """1 leaves parameters and moments as they are, 0 does not."""

    def on(self, device: torch.device) -> Conditions:
        """The same for tensors on `device`."""
        return self if self.skip.device == device else Conditions(self.divisor.to(device), self.skip.to(device))
