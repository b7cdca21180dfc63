"""`FusedLion`: Lion for parameters on any device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed.ops.lion.one_pass import lion_one_pass_, takes_one_pass
from deepspeed.ops.lion.rule import LionRule, lion_
from deepspeed.ops.moments import moment_width
from deepspeed.ops.optimizer import Batch, BatchOptimizer, Closure, Group, check_hyperparameters, refuse

__all__ = ["FusedLion"]


class FusedLion(BatchOptimizer):
    """Lion with decoupled weight decay; the momentum has the dtype of its parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        moment_bits: int | None = None,
    ) -> None:
        check_hyperparameters("FusedLion", lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
        self.moment_bits = moment_width("FusedLion", moment_bits)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to zero where `set_grad_none` is false."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(
        self,
        closure: Closure | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        refuse(
            "FusedLion.step",
            grads=grads,
            output_params=output_params,
            scale=scale,
            grad_norms=grad_norms,
            grad_scaler=grad_scaler,
        )
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        group.setdefault("step", 0)
        super()._update_group(group)

    def _apply(self, group: Group, batch: Batch) -> None:
        device = batch.params[0].device
        if batch.scales or self.takes_one_pass(device):
            lion_one_pass_(batch, LionRule.of(group), self._conditions_on(device))
        else:
            lion_(batch, LionRule.of(group))

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`."""
        return takes_one_pass(device)
