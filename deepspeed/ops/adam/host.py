"""Adam and AdamW over parameters in host memory: op `cpu_adam`."""

from __future__ import annotations

import math

from deepspeed.ops.adam.rule import AdamRule, adam_reference
from deepspeed.ops.host_update import HostRule, register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_adam_"]


def cpu_adam_(batch: Batch, rule: AdamRule) -> None:
    """Update parameters and moments (exp_avg, exp_avg_sq) in place; `batch.step` counts from 1."""
    op("cpu_adam")(batch, rule)


def _numbers(batch: Batch, rule: AdamRule) -> tuple[float, ...]:
    first, second = rule.corrections(batch.step)
    keep = 1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0
    l2 = 0.0 if rule.decoupled else rule.weight_decay
    moments = (1 - rule.beta1, rule.beta2, 1 - rule.beta2)
    return (keep, l2, *moments, rule.lr / first, 1 / math.sqrt(second), rule.eps)


register(
    HostRule(
        "adam",
        oracle=adam_reference,
        signed=(True, False),
        arguments=lambda batch, rule: (batch.step, rule),
        numbers=_numbers,
    )
)
