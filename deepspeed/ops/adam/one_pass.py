"""Adam in one pass over device memory: op `adam_one_pass`."""

from __future__ import annotations

import torch

from deepspeed.ops.adam.rule import ADAM, AdamRule, takes_conditions
from deepspeed.ops.conditions import Conditions
from deepspeed.ops.device_update import has_kernel, register
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["ONE_PASS", "adam_one_pass_", "takes_one_pass"]


def adam_one_pass_(batch: Batch, rule: AdamRule, conditions: Conditions | None = None) -> None:
    """Update a batch in place: gradients are those of `batch`, times its factor, divided as `conditions` say.

    Updated parameters go to `batch.outs` as well. Where the conditions say skip nothing changes.
    """
    op("adam_one_pass")(batch, rule, conditions)


def takes_one_pass(device: torch.device) -> bool:
    """True if there is a kernel for parameters on such a device; ranks must agree, so that nothing else decides.

    Where another implementation of `adam` was asked for, that one is used.
    """
    return takes_conditions(device) and has_kernel("adam", device)


ONE_PASS = register(ADAM)
