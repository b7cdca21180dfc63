"""Adam and AdamW over parameters in host memory: op `cpu_adam`."""

from __future__ import annotations

from deepspeed.ops.adam.rule import ADAM, AdamRule
from deepspeed.ops.host_update import register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_adam_"]


def cpu_adam_(batch: Batch, rule: AdamRule) -> None:
    """Update parameters and moments (exp_avg, exp_avg_sq) in place; `batch.step` counts from 1."""
    op("cpu_adam")(batch, rule)


register(ADAM)
