"""Update rules over parameters in host memory, which also do what a `HostStep` asks for: ops `cpu_adam` and the like.

A rule has its arithmetic over lists of tensors; `HostRule` makes an op of it that takes whole batches. The compiled
kernels do everything in one pass over memory; torch's operations go tensor by tensor, through copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import blockwise
from deepspeed.ops.optimizer import Batch, wide
from deepspeed.ops.registry import implementation, op

__all__ = ["HostRule", "host_op"]

Update = Callable[..., None]


@dataclass(frozen=True, slots=True)
class HostRule:
    """An update rule that can be applied to a `Batch`."""

    name: str
    """The op over lists: `op(name)(params, grads, *moments, *arguments(batch, rule))`."""
    oracle: Update
    """Its reference."""
    signed: tuple[bool, ...]
    """Of each moment, whether it can be negative."""
    arguments: Callable[[Batch, Any], tuple[Any, ...]]


def host_op(rule: HostRule) -> Callable[[Batch, Any], None]:
    """Register op `cpu_<name>` and return the function that calls it with a batch and the numbers of the rule."""
    name = f"cpu_{rule.name}"

    def by(update: Callable[[], Update]) -> Callable[[], Update]:
        return lambda: lambda batch, numbers: _update_by_torch(rule, batch, numbers, update())

    implementation(name, name="reference", rank=0)(by(lambda: rule.oracle))
    implementation(name, name="torch", rank=10)(by(lambda: op(rule.name)))
    return lambda batch, numbers: op(name)(batch, numbers)


@torch.no_grad()
def _update_by_torch(rule: HostRule, batch: Batch, numbers: Any, update: Update) -> None:
    """Gradients times the factor, decoded moments, then `update`; codes and outs afterwards."""
    arguments = rule.arguments(batch, numbers)
    if batch.factor == 1.0 and not batch.outs and not batch.scales:
        update(batch.params, batch.grads, *batch.moments, *arguments)
        return
    for place, param in enumerate(batch.params):
        grad = batch.grads[place]
        if batch.factor != 1.0:
            grad = grad.to(wide(param.dtype)) * batch.factor
        moments = [tensors[place] for tensors in batch.moments]
        scales = [tensors[place] for tensors in batch.scales]
        values = _decoded(param, moments, scales, rule.signed) if scales else moments
        update([param], [grad], *([each] for each in values), *arguments)
        if scales:
            _encode(values, moments, scales, rule.signed, batch.step)
        if batch.outs:
            batch.outs[place].copy_(param)


def _decoded(param: Tensor, moments: list[Tensor], scales: list[Tensor], signed: tuple[bool, ...]) -> list[Tensor]:
    return [
        blockwise.decode(codes, scale, signed=sign).view(param.shape)
        for codes, scale, sign in zip(moments, scales, signed, strict=True)
    ]


def _encode(
    values: list[Tensor], moments: list[Tensor], scales: list[Tensor], signed: tuple[bool, ...], step: int
) -> None:
    for value, codes, scale, sign in zip(values, moments, scales, signed, strict=True):
        noise = blockwise.dither(value.numel(), step, signed=sign)
        blockwise.encode(value, codes, scale, signed=sign, dither=noise)
