"""Adagrad over parameters in host memory: op `cpu_adagrad`."""

from __future__ import annotations

from deepspeed.ops.adagrad.rule import adagrad_reference
from deepspeed.ops.host_update import HostRule, host_op

__all__ = ["cpu_adagrad_"]

cpu_adagrad_ = host_op(
    HostRule("adagrad", oracle=adagrad_reference, signed=(False,), arguments=lambda batch, rule: (rule,))
)
"""Update a batch of parameters in host memory by an `AdagradRule`."""
