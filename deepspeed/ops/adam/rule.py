"""The Adam and AdamW update over lists of tensors: op `adam`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, has_kernel, register_on_host, register_one_pass
from deepspeed.ops.moments import wide
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import ParameterBatch, TensorLists, contiguous, widely
from deepspeed.ops.precompile import is_placeholder
from deepspeed.ops.registry import implements, op, reference

Tensors = list[Tensor]

# A smaller learning rate changes no float32, and its inverse is none.
_NO_RATE = 1e-30

# Where torch's fused kernels are known to run.
_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class AdamRule:
    """The numbers of one update; `decoupled` weight decay is AdamW's, else it is an L2 term of the gradient."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True

    @classmethod
    def of(cls, group: Mapping[str, Any], *, decoupled: bool) -> AdamRule:
        """The rule of a parameter group."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decoupled,
            bias_correction=group.get("bias_correction", True),
        )

    def corrections(self, step: int) -> tuple[float, float]:
        """What the two moments are divided by at this step."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**step, 1 - self.beta2**step


def takes_conditions(device: torch.device) -> bool:
    """True if the chosen implementation updates parameters on such a device under conditions, whatever they are.

    Ranks whose parameters differ, or that have none, must take the same kind of step: nothing else may decide here.
    """
    return op("adam") is _adam_fused and (device.type == "cuda" or is_placeholder(device))


@reference("adam")
@torch.no_grad()
def adam_reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: int, rule: AdamRule
) -> None:
    """Tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    first, second = rule.corrections(step)
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        dtype = wide(param.dtype)
        p, g, m, v = (tensor.to(dtype) for tensor in (param, grad, exp_avg, exp_avg_sq))
        if rule.decoupled:
            p = p * (1 - rule.lr * rule.weight_decay)
        else:
            g = g + rule.weight_decay * p
        m = m.lerp(g, 1 - rule.beta1)
        v = rule.beta2 * v + (1 - rule.beta2) * g * g
        p = p - rule.lr / first * m / (v.sqrt() / math.sqrt(second) + rule.eps)
        for target, result in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
            target.copy_(result)


def _numbers(batch: ParameterBatch, rule: AdamRule) -> tuple[float, ...]:
    first, second = rule.corrections(batch.step)
    keep = 1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0
    l2 = 0.0 if rule.decoupled else rule.weight_decay
    rate = rule.lr / first
    # Kernels divide by the rate before they divide; none at all is a division by infinity.
    divisor = (1 / (math.sqrt(second) * rate), rule.eps / rate) if abs(rate) > _NO_RATE else (0.0, math.inf)
    return (keep, l2, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, *divisor)


ADAM = BatchRule(
    "adam",
    oracle=adam_reference,
    signed=(True, False),
    arguments=lambda batch, rule: (batch.step, rule),
    numbers=_numbers,
)
"""Adam for whole batches."""


@implements("adam", name="foreach")
@torch.no_grad()
def _adam_foreach(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: int, rule: AdamRule
) -> None:
    first, second = rule.corrections(step)

    def update(lists: TensorLists) -> None:
        p, g, m, v = lists
        if rule.weight_decay and rule.decoupled:
            torch._foreach_mul_(p, 1 - rule.lr * rule.weight_decay)
        elif rule.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=rule.weight_decay))
        torch._foreach_lerp_(m, g, 1 - rule.beta1)
        torch._foreach_mul_(v, rule.beta2)
        torch._foreach_addcmul_(v, g, g, 1 - rule.beta2)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, math.sqrt(second))
        torch._foreach_add_(denominators, rule.eps)
        torch._foreach_addcdiv_(p, m, denominators, -rule.lr / first)

    widely(update, (params, grads, exp_avgs, exp_avg_sqs))


@implements("adam", name="fused", rank=20)
@torch.no_grad()
def _adam_fused(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    rule: AdamRule,
    conditions: Conditions | None = None,
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    if not params:
        return
    device = params[0].device
    dense = contiguous(lists)
    if conditions is None and not (dense and device.type in _FUSED_DEVICES):
        _adam_foreach(params, grads, exp_avgs, exp_avg_sqs, step, rule)
        return
    if not dense:  # the kernel walks memory, and no other way knows conditions
        p, g, m, v = ([tensor.contiguous() for tensor in tensors] for tensors in lists)
        _adam_fused(p, g, m, v, step, rule, conditions)
        for tensors, computed in ((params, p), (exp_avgs, m), (exp_avg_sqs, v)):
            torch._foreach_copy_(tensors, computed)
        return
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    # The kernel has no switch for the bias correction: at step infinity both corrections are exactly 1.
    count = torch.full((), step if rule.bias_correction else math.inf, dtype=torch.float32, device=device)

    def update(lists: TensorLists) -> None:
        p, g, m, v = lists
        kernel(
            p, g, m, v, [], [count] * len(p),
            lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.weight_decay, eps=rule.eps,
            amsgrad=False, maximize=False,
            grad_scale=None if conditions is None else conditions.divisor,
            found_inf=None if conditions is None else conditions.skip,
        )  # fmt: skip

    if len({tensors[0].dtype for tensors in lists}) == 1:
        update(lists)  # the kernel itself computes 16-bit tensors in float32
    else:
        widely(update, lists)


register_on_host(ADAM)
ONE_PASS = register_one_pass(ADAM)


def takes_one_pass(device: torch.device) -> bool:
    """True if there is a kernel for parameters on such a device; ranks must agree, so that nothing else decides.

    Where another implementation of `adam` was asked for, that one is used.
    """
    return takes_conditions(device) and has_kernel(ADAM, device)
