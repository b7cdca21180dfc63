"""Lion over parameters in host memory: op `cpu_lion`."""

from __future__ import annotations

from deepspeed.ops.host_update import HostRule, host_op
from deepspeed.ops.lion.rule import lion_reference

__all__ = ["cpu_lion_"]

cpu_lion_ = host_op(HostRule("lion", oracle=lion_reference, signed=(True,), arguments=lambda batch, rule: (rule,)))
"""Update a batch of parameters in host memory by a `LionRule`."""
