"""Adagrad over parameters in host memory: op `cpu_adagrad`."""

from __future__ import annotations

from deepspeed.ops.adagrad.rule import ADAGRAD, AdagradRule
from deepspeed.ops.host_update import register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_adagrad_"]


def cpu_adagrad_(batch: Batch, rule: AdagradRule) -> None:
    """Update parameters and sums of squares (exp_avg_sq) in place."""
    op("cpu_adagrad")(batch, rule)


register(ADAGRAD)
