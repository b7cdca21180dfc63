"""`FusedLion`: Lion for parameters on any device."""

from __future__ import annotations

from typing import Any, ClassVar

from deepspeed.ops.lion.rule import LionRule, lion_, lion_one_pass_
from deepspeed.ops.optimizer import Group, ParameterBatch
from deepspeed.ops.rule_optimizers import DeviceOptimizer

__all__ = ["FusedLion"]


class FusedLion(DeviceOptimizer):
    """Lion with decoupled weight decay; the momentum has the dtype of its parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    rule: ClassVar[str] = "lion"

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
        self.set_grad_none = set_grad_none
        self._set_up(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, moment_bits)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        device = batch.params[0].device
        if batch.scales or self.takes_one_pass(device):
            lion_one_pass_(batch, LionRule.of(group), self._conditions_on(device))
        else:
            lion_(batch, LionRule.of(group))
