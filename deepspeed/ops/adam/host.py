"""Adam and AdamW over parameters in host memory: op `cpu_adam`."""

from __future__ import annotations

from deepspeed.ops.adam.rule import adam_reference
from deepspeed.ops.host_update import HostRule, host_op

__all__ = ["cpu_adam_"]

cpu_adam_ = host_op(
    HostRule(
        "adam",
        oracle=adam_reference,
        signed=(True, False),
        arguments=lambda batch, rule: (batch.step, rule),
    )
)
"""Update a batch of parameters in host memory by an `AdamRule`."""
