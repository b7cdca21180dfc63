"""`BatchRule`: an update rule as everybody sees it who applies it to whole batches, in host memory or on a device.

A rule has its arithmetic over lists of tensors. What a batch asks for besides (a factor, conditions, moments in 8 bits,
copies for the model) is done around it here, by torch's operations; `host_update` and `device_update` have kernels that
do all of it in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import blockwise
from deepspeed.ops.conditions import Conditions
from deepspeed.ops.optimizer import Batch, wide

__all__ = ["BatchRule", "Numbers", "Update", "update_by_torch"]

Numbers = tuple[float, ...]
"""What a rule hands to a kernel."""
Update = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BatchRule:
    """An update rule that can be applied to a `Batch`."""

    name: str
    """The op over lists: `op(name)(params, grads, *moments, *arguments(batch, rule))`."""
    oracle: Update
    """Its reference."""
    signed: tuple[bool, ...]
    """Of each moment, whether it can be negative."""
    arguments: Callable[[Batch, Any], tuple[Any, ...]]
    numbers: Callable[[Batch, Any], Numbers]
    """The same for kernels."""


@torch.no_grad()
def update_by_torch(
    rule: BatchRule, batch: Batch, given: Any, update: Update, conditions: Conditions | None = None
) -> list[Any]:
    """Gradients times the factor, decoded moments, then `update`; codes and outs afterwards.

    Returns what the calls of `update` returned. `given` are the numbers of this update, such as an `AdamRule`.
    """
    if conditions is not None and bool(conditions.skip != 0):
        return []
    arguments = rule.arguments(batch, given)
    if batch.factor == 1.0 and conditions is None and not batch.outs and not batch.scales:
        return [update(batch.params, batch.grads, *batch.moments, *arguments)]
    results = []
    for place, param in enumerate(batch.params):
        grad = batch.grads[place]
        if batch.factor != 1.0 or conditions is not None:
            grad = grad.to(wide(param.dtype)) * batch.factor
        if conditions is not None:
            grad = grad / conditions.divisor
        moments = [tensors[place] for tensors in batch.moments]
        scales = [tensors[place] for tensors in batch.scales]
        values = _decoded(param, moments, scales, rule.signed) if scales else moments
        results.append(update([param], [grad], *([each] for each in values), *arguments))
        if scales:
            _encode(values, moments, scales, rule.signed, batch.step)
        if batch.outs:
            batch.outs[place].copy_(param)
    return results


def _decoded(
    param: Tensor, moments: Sequence[Tensor], scales: Sequence[Tensor], signed: tuple[bool, ...]
) -> list[Tensor]:
    return [
        blockwise.decode(codes, scale, signed=sign).view(param.shape)
        for codes, scale, sign in zip(moments, scales, signed, strict=True)
    ]


def _encode(
    values: Sequence[Tensor], moments: Sequence[Tensor], scales: Sequence[Tensor], signed: tuple[bool, ...], step: int
) -> None:
    for value, codes, scale, sign in zip(values, moments, scales, signed, strict=True):
        noise = blockwise.dither(value.numel(), step, signed=sign, device=value.device)
        blockwise.encode(value, codes, scale, signed=sign, dither=noise)
