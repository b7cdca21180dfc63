"""Adam and AdamW over parameters in host memory: op `cpu_adam`."""

from __future__ import annotations

import math

from deepspeed.ops.adam.rule import AdamRule, adam_reference
from deepspeed.ops.host_update import HostRule, register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_adam_"]

# A smaller learning rate changes no float32, and its inverse is none.
_NO_RATE = 1e-30


def cpu_adam_(batch: Batch, rule: AdamRule) -> None:
    """Update parameters and moments (exp_avg, exp_avg_sq) in place; `batch.step` counts from 1."""
    op("cpu_adam")(batch, rule)


def _numbers(batch: Batch, rule: AdamRule) -> tuple[float, ...]:
    first, second = rule.corrections(batch.step)
    keep = 1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0
    l2 = 0.0 if rule.decoupled else rule.weight_decay
    rate = rule.lr / first
    # The kernel divides by the rate before it divides; none at all is a division by infinity.
    divisor = (1 / (math.sqrt(second) * rate), rule.eps / rate) if abs(rate) > _NO_RATE else (0.0, math.inf)
    return (keep, l2, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, *divisor)


register(
    HostRule(
        "adam",
        oracle=adam_reference,
        signed=(True, False),
        arguments=lambda batch, rule: (batch.step, rule),
        numbers=_numbers,
    )
)
