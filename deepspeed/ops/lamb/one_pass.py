"""LAMB in two passes over device memory, as few as the norms of whole tensors allow: op `lamb_one_pass`.

The first advances the moments and sums the squares of weights and updates, the second computes the updates again from
what it reads anyway. No update is ever in memory. Moments in 8 bits are advanced by the second pass, which reads the
gradient again: written by the first they would be rounded before they are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.conditions import Conditions
from deepspeed.ops.device_update import has_kernel, register
from deepspeed.ops.lamb.rule import LAMB, LambRule
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import op

__all__ = ["ONE_PASS", "lamb_one_pass_", "takes_one_pass"]


def lamb_one_pass_(batch: Batch, rule: LambRule, conditions: Conditions | None = None) -> list[Tensor]:
    """As `deepspeed.ops.adam.one_pass.adam_one_pass_`, of LAMB; the coefficients as 0-dim tensors."""
    results: list[list[Tensor]] = op("lamb_one_pass")(batch, rule, conditions)
    return [coefficient for result in results for coefficient in result]


def takes_one_pass(device: torch.device) -> bool:
    """True if there is a kernel for parameters on such a device; ranks must agree, so that nothing else decides."""
    return has_kernel("lamb", device)


def _kernels(batch: Batch, rule: LambRule, conditions: Conditions | None) -> list[list[Tensor]]:
    from deepspeed.ops.kernels.many import Columns, Launch, launch, programs_of, trust_ratios

    device, factor = batch.params[0].device, batch.factor
    if isinstance(rule.scale, Tensor):
        given = Conditions(rule.scale, torch.zeros((), device=device)) if conditions is None else conditions
        conditions = given if conditions is None else Conditions(given.divisor * rule.scale, given.skip)
    else:
        factor /= rule.scale
    columns, numbers = Columns.of(batch), LAMB.numbers(batch, rule)
    partial = torch.zeros(programs_of(columns), 2, device=device)
    launch(columns, Launch("lamb_moments", numbers, factor, conditions=conditions, beside=partial))
    coefficients = trust_ratios(columns, partial, rule.min_coeff, rule.max_coeff)
    launch(columns, Launch("lamb_apply", numbers, factor, batch.step, conditions, coefficients))
    return [list(coefficients.unbind())]


ONE_PASS = register(LAMB, _kernels)
