"""Update rules over parameters in host memory, which also do what a `OnePass` asks for: ops `cpu_adam` and the like.

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
from deepspeed.ops.capability import has_cxx_compiler
from deepspeed.ops.host_kernels import Numbers, host_kernel, takes
from deepspeed.ops.optimizer import Batch, wide
from deepspeed.ops.registry import implementation, op

__all__ = ["HostRule", "register"]

Update = Callable[..., None]
BatchUpdate = Callable[[Batch, Any], None]


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
    numbers: Callable[[Batch, Any], Numbers]
    """The same for the compiled kernel."""


def register(rule: HostRule) -> None:
    """Register op `cpu_<name>`: `op("cpu_adam")(batch, numbers of the rule)`."""
    name = f"cpu_{rule.name}"
    implementation(name, name="reference", rank=0)(lambda: _by_torch(rule, lambda: rule.oracle))
    implementation(name, name="torch", rank=10)(lambda: _by_torch(rule, lambda: op(rule.name)))
    implementation(name, name="native", requires=has_cxx_compiler, rank=20)(lambda: _compiled(rule))


def _compiled(rule: HostRule) -> BatchUpdate:
    kernel = host_kernel(rule.name)
    other = _by_torch(rule, lambda: op(rule.name))

    def update(batch: Batch, numbers: Any) -> None:
        if takes(batch):
            kernel(batch, rule.numbers(batch, numbers))
        else:  # float64, or tensors with gaps
            other(batch, numbers)

    return update


def _by_torch(rule: HostRule, update: Callable[[], Update]) -> BatchUpdate:
    return lambda batch, numbers: _update_by_torch(rule, batch, numbers, update())


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
