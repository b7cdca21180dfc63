"""The Adagrad update over lists of tensors: op `adagrad`.

g ← g + decay·p;  v ← v + g²;  p ← p − lr·g / (√v + eps)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, register_on_host
from deepspeed.ops.moments import wide
from deepspeed.ops.optimizer import ParameterBatch, TensorLists, contiguous, widely
from deepspeed.ops.registry import implements, reference

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True)
class AdagradRule:
    """The numbers of one update; weight decay is an L2 term of the gradient."""

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdagradRule:
        """The rule of a parameter group."""
        return cls(float(group["lr"]), group["eps"], group["weight_decay"])


@reference("adagrad")
@torch.no_grad()
def adagrad_reference(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    """Tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    for param, grad, total in zip(params, grads, sums, strict=True):
        dtype = wide(param.dtype)
        p, g, v = (tensor.to(dtype) for tensor in (param, grad, total))
        g = g + rule.weight_decay * p
        v = v + g * g
        param.copy_(p - rule.lr * g / (v.sqrt() + rule.eps))
        total.copy_(v)


def _numbers(batch: ParameterBatch, rule: AdagradRule) -> tuple[float, ...]:
    return (rule.weight_decay, rule.lr, rule.eps)


ADAGRAD = BatchRule(
    "adagrad", oracle=adagrad_reference, signed=(False,), arguments=lambda batch, rule: (rule,), numbers=_numbers
)
"""Adagrad for whole batches."""


@implements("adagrad", name="foreach")
@torch.no_grad()
def _adagrad_foreach(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    def update(lists: TensorLists) -> None:
        p, g, v = lists
        if rule.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=rule.weight_decay))
        torch._foreach_addcmul_(v, g, g, 1.0)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, rule.eps)
        torch._foreach_addcdiv_(p, g, denominators, -rule.lr)

    widely(update, (params, grads, sums))


@implements("adagrad", name="fused", rank=20)
@torch.no_grad()
def _adagrad_fused(params: Tensors, grads: Tensors, sums: Tensors, rule: AdagradRule) -> None:
    lists = (params, grads, sums)
    if not params:
        return
    if params[0].device.type != "cpu" or not contiguous(lists):
        _adagrad_foreach(params, grads, sums, rule)
        return
    count = torch.ones(())  # matters only to a decaying learning rate, which this rule does not have

    def update(lists: TensorLists) -> None:
        p, g, v = lists
        torch._fused_adagrad_(
            p, g, v, [count] * len(p),
            lr=rule.lr, lr_decay=0.0, weight_decay=rule.weight_decay, eps=rule.eps, maximize=False,
        )  # fmt: skip

    widely(update, lists)


register_on_host(ADAGRAD)
