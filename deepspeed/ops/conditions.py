"""What the device decides while it updates: steps that are queued before the host knows the norm of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Conditions"]


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
