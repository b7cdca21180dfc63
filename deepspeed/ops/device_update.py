"""Update rules in one pass over a device's memory: ops `adam_one_pass`, `lion_one_pass` and `lamb_one_pass`.

Unscale, clip, update and round for the model; gradients are read in the dtype they arrived in, and moments may be 8-bit
codes. `ops/kernels` has the kernels; the reference is the rule's own with torch's operations around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from deepspeed.ops.batch_rule import BatchRule, update_by_torch
from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.conditions import Conditions
from deepspeed.ops.optimizer import Batch, contiguous
from deepspeed.ops.registry import chosen, implementation
from deepspeed.ops.rehearsal import on_stage

__all__ = ["DeviceUpdate", "has_kernel", "register"]

Apply = Callable[[Batch, Any, Conditions | None], list[Any]]
"""(batch of dense tensors, numbers of the rule, conditions) → what the rule returns of each parameter, if anything."""


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """A rule in one pass: `(batch, numbers of the rule, conditions)`, by torch or by a kernel."""

    rule: BatchRule
    kernel: Apply

    def reference(self, batch: Batch, given: Any, conditions: Conditions | None = None) -> list[Any]:
        """In plain torch."""
        return update_by_torch(self.rule, batch, given, self.rule.oracle, conditions)

    @torch.no_grad()
    def triton(self, batch: Batch, given: Any, conditions: Conditions | None = None) -> list[Any]:
        """By the kernel; what it does not take is copied to where it does."""
        if not batch.params:
            return []
        if batch.params[0].dtype == torch.float64:
            return self.reference(batch, given, conditions)
        lists = [batch.params, batch.grads, *batch.moments]
        dense = contiguous([*lists, batch.outs])
        if dense:
            results = self.kernel(batch, given, conditions)
            # a kernel's writes are not seen by autograd, which would not notice that a saved weight has changed
            increment_version([*batch.params, *batch.outs])
            return results
        params, grads, *moments = [[tensor.contiguous() for tensor in tensors] for tensors in lists]
        sent = replace(batch, params=params, grads=grads, moments=tuple(moments), outs=[])
        results = self.kernel(sent, given, conditions)
        for tensors, computed in zip((batch.params, *batch.moments), (params, *moments), strict=True):
            torch._foreach_copy_(tensors, computed)
        if batch.outs:
            torch._foreach_copy_(batch.outs, batch.params)
        return results


def register(rule: BatchRule, kernel: Apply | None = None) -> DeviceUpdate:
    """Register op `<name>_one_pass`: `op("adam_one_pass")(batch, numbers of the rule, conditions)`.

    Without a `kernel` one launch of the rule's body does it.
    """
    made = DeviceUpdate(rule, partial(_launched, rule) if kernel is None else kernel)
    name = f"{rule.name}_one_pass"
    implementation(name, name="reference", rank=0)(lambda: made.reference)
    implementation(name, name="triton", requires=has_triton & on_cuda, rank=20)(lambda: made.triton)
    return made


def _launched(rule: BatchRule, batch: Batch, given: Any, conditions: Conditions | None) -> list[Any]:
    from deepspeed.ops.kernels.many import Columns, Launch, launch

    launch(Columns.of(batch), Launch(rule.name, rule.numbers(batch, given), batch.factor, batch.step, conditions))
    return []


def has_kernel(rule: str, device: torch.device) -> bool:
    """True if a kernel updates parameters on such a device; ranks must agree, so that nothing else decides."""
    return (device.type == "cuda" or on_stage(device)) and chosen(f"{rule}_one_pass") != "reference"
