"""`DeepSpeedCPULion`: Lion for parameters in host memory."""

from __future__ import annotations

from typing import Any, ClassVar

from deepspeed.ops.lion.host import cpu_lion_
from deepspeed.ops.lion.one_pass import lion_one_pass_
from deepspeed.ops.lion.rule import LionRule
from deepspeed.ops.moments import moment_width
from deepspeed.ops.optimizer import Batch, BatchOptimizer, Closure, Group, check_hyperparameters
from deepspeed.ops.registry import op

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(BatchOptimizer):
    """Lion with decoupled weight decay, of parameters on the CPU.

    The momentum is float32, or has the dtype of its parameter if `fp32_optimizer_states` is false; `moment_bits`
    chooses itself: 32, 16 (bfloat16) or 8 (block-wise). `adamw_mode` is there for client libraries that hand it to
    every CPU optimizer: Lion's decay is decoupled either way.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("fp32_optimizer_states",)
    cpu_only: ClassVar[bool] = True

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
        check_hyperparameters("DeepSpeedCPULion", lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.moment_bits = moment_width("DeepSpeedCPULion", moment_bits)
        op("cpu_lion")  # compiled now if it has to be, not by the first step
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        return self._step(closure)

    def _apply(self, group: Group, batch: Batch) -> None:
        # an engine may keep some on its device
        step = cpu_lion_ if batch.params[0].device.type == "cpu" else lion_one_pass_
        step(batch, LionRule.of(group))
