"""`FusedLion`: Lion for parameters on any device."""

from __future__ import annotations

from typing import Any, ClassVar

from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.lion.rule import LION, LionRule
from deepspeed.ops.moments import Group
from deepspeed.ops.rule_optimizers import DeviceOptimizer

__all__ = ["FusedLion"]


class FusedLion(DeviceOptimizer):
    """Lion with decoupled weight decay; the momentum has the dtype of its parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    rule: ClassVar[BatchRule] = LION

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

    def _rule_of(self, group: Group) -> LionRule:
        return LionRule.of(group)
