"""Lion in one pass over device memory: op `lion_one_pass`."""

from __future__ import annotations

import torch

from deepspeed.ops.conditions import Conditions
from deepspeed.ops.device_update import has_kernel, register
from deepspeed.ops.lion.rule import LION, LionRule
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["ONE_PASS", "lion_one_pass_", "takes_one_pass"]


def lion_one_pass_(batch: Batch, rule: LionRule, conditions: Conditions | None = None) -> None:
    """As `deepspeed.ops.adam.one_pass.adam_one_pass_`, of Lion."""
    op("lion_one_pass")(batch, rule, conditions)


def takes_one_pass(device: torch.device) -> bool:
    """True if there is a kernel for parameters on such a device; ranks must agree, so that nothing else decides."""
    return has_kernel("lion", device)


ONE_PASS = register(LION)
