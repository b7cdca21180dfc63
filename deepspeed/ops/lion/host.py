"""Lion over parameters in host memory: op `cpu_lion`."""

from __future__ import annotations

from deepspeed.ops.host_update import HostRule, register
from deepspeed.ops.lion.rule import LionRule, lion_reference
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_lion_"]


def cpu_lion_(batch: Batch, rule: LionRule) -> None:
    """Update parameters and momenta (exp_avg) in place."""
    op("cpu_lion")(batch, rule)


def _numbers(batch: Batch, rule: LionRule) -> tuple[float, ...]:
    return (1 - rule.lr * rule.weight_decay, 1 - rule.beta1, 1 - rule.beta2, rule.lr)


register(
    HostRule("lion", oracle=lion_reference, signed=(True,), arguments=lambda batch, rule: (rule,), numbers=_numbers)
)
