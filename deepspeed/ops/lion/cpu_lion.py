"""`DeepSpeedCPULion`: Lion for parameters in host memory."""

from __future__ import annotations

from typing import Any, ClassVar

from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.lion.rule import LION, LionRule
from deepspeed.ops.moments import Group
from deepspeed.ops.rule_optimizers import HostOptimizer

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(HostOptimizer):
    """Lion with decoupled weight decay, of parameters on the CPU.

    The momentum is float32, or has the dtype of its parameter if `fp32_optimizer_states` is false; `moment_bits`
    chooses itself: 32, 16 (bfloat16) or 8 (block-wise). `adamw_mode` is there for client libraries that hand it to
    every CPU optimizer: Lion's decay is decoupled either way.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    rule: ClassVar[BatchRule] = LION

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool | None = None,
        moment_bits: int | None = None,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self._set_up(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, moment_bits)

    def _rule_of(self, group: Group) -> LionRule:
        return LionRule.of(group)
