"""Adam in one pass over device memory: unscale, clip, update, round for the model. Op `adam_one_pass`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from deepspeed.ops.adam.rule import AdamRule, Conditions, adam_reference, takes_conditions
from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.optimizer import Batch, contiguous, wide
from deepspeed.ops.registry import implementation, op, reference

__all__ = ["adam_one_pass_", "adam_one_pass_reference_", "adam_one_pass_triton_", "takes_one_pass"]

Kernel = Callable[..., None]


def adam_one_pass_(batch: Batch, rule: AdamRule, conditions: Conditions | None = None) -> None:
    """Update a batch in place: gradients are those of `batch`, times its factor, divided as `conditions` say.

    Updated parameters go to `batch.outs` as well. Where the conditions say skip nothing changes.
    """
    op("adam_one_pass")(batch, rule, conditions)


def takes_one_pass(device: torch.device) -> bool:
    """True if there is a kernel for parameters on such a device; ranks must agree, so that nothing else decides.

    Where another implementation of `adam` was asked for, that one is used.
    """
    return takes_conditions(device) and op("adam_one_pass") is not adam_one_pass_reference_


@reference("adam_one_pass")
@torch.no_grad()
def adam_one_pass_reference_(batch: Batch, rule: AdamRule, conditions: Conditions | None = None) -> None:
    """In plain torch."""
    if conditions is not None and bool(conditions.skip != 0):
        return
    divisor = 1.0 if conditions is None else conditions.divisor
    grads = [
        grad.to(wide(param.dtype)) * batch.factor / divisor
        for param, grad in zip(batch.params, batch.grads, strict=True)
    ]
    exp_avgs, exp_avg_sqs = batch.moments
    adam_reference(batch.params, grads, exp_avgs, exp_avg_sqs, batch.step, rule)
    if batch.outs:
        torch._foreach_copy_(batch.outs, batch.params)


@torch.no_grad()
def adam_one_pass_triton_(batch: Batch, rule: AdamRule, conditions: Conditions | None = None) -> None:
    """By the kernel; what it does not take is copied to where it does."""
    from deepspeed.ops.adam.kernels.update import adam_many

    if not batch.params:
        return
    lists = [batch.params, batch.grads, *batch.moments]
    if batch.params[0].dtype == torch.float64:
        adam_one_pass_reference_(batch, rule, conditions)
        return
    dense = contiguous([*lists, batch.outs])
    sent = lists if dense else [[tensor.contiguous() for tensor in tensors] for tensors in lists]
    outs = batch.outs if dense else []
    adam_many(sent, outs, batch.step, rule, factor=batch.factor, conditions=conditions)
    if not dense:
        for place, (tensors, computed) in enumerate(zip(lists, sent, strict=True)):
            if place != 1:
                torch._foreach_copy_(tensors, computed)
        if batch.outs:
            torch._foreach_copy_(batch.outs, batch.params)
        return
    # a kernel's writes are not seen by autograd, which would not notice that a saved weight has changed
    increment_version([*batch.params, *batch.outs])


@implementation("adam_one_pass", name="triton", requires=has_triton & on_cuda, rank=20)
def _load_triton() -> Kernel:
    return adam_one_pass_triton_
