"""Adagrad over parameters in host memory: op `cpu_adagrad`."""

from __future__ import annotations

from deepspeed.ops.adagrad.rule import AdagradRule, adagrad_reference
from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.host_update import register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_adagrad_"]


def cpu_adagrad_(batch: Batch, rule: AdagradRule) -> None:
    """Update parameters and sums of squares (exp_avg_sq) in place."""
    op("cpu_adagrad")(batch, rule)


def _numbers(batch: Batch, rule: AdagradRule) -> tuple[float, ...]:
    return (rule.weight_decay, rule.lr, rule.eps)


register(
    BatchRule(
        "adagrad", oracle=adagrad_reference, signed=(False,), arguments=lambda batch, rule: (rule,), numbers=_numbers
    )
)
