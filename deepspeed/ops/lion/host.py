"""Lion over parameters in host memory: op `cpu_lion`."""

from __future__ import annotations

from deepspeed.ops.host_update import register
from deepspeed.ops.lion.rule import LION, LionRule
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["cpu_lion_"]


def cpu_lion_(batch: Batch, rule: LionRule) -> None:
    """Update parameters and momenta (exp_avg) in place."""
    op("cpu_lion")(batch, rule)


register(LION)
