"""Optimizers whose step is queued before the host knows the norm: the device divides, and skips where it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Adam, Optimizer

from deepspeed.ops.conditions import Conditions
from deepspeed.ops.optimizer import BatchOptimizer

__all__ = ["in_one_pass", "reads_narrow", "steps_ahead", "take_back", "under"]


def steps_ahead(optimizer: Optimizer, device: torch.device) -> bool:
    """True if a step over parameters on `device` can be queued; the same on all ranks, whatever each of them holds."""
    if isinstance(optimizer, BatchOptimizer):
        return optimizer.takes_conditions(device)
    # torch's fused kernels take what its gradient scaler gives them
    return device.type == "cuda" and isinstance(optimizer, Adam) and all(g.get("fused") for g in optimizer.param_groups)


def in_one_pass(optimizer: Optimizer, device: torch.device) -> bool:
    """True if such a step reads gradients as they arrived, and writes what the model computes with."""
    return reads_narrow(optimizer, device) and not getattr(optimizer, "cpu_only", False)


def reads_narrow(optimizer: Optimizer, device: torch.device) -> bool:
    """The same of a step that is taken when the norm is known, also by an optimizer for host memory."""
    return isinstance(optimizer, BatchOptimizer) and optimizer.takes_one_pass(device)


@contextmanager
def under(optimizer: Optimizer, conditions: Conditions) -> Iterator[None]:
    """Steps that are taken inside obey these conditions."""
    if isinstance(optimizer, BatchOptimizer):
        with optimizer.under(conditions):
            yield
        return
    values = {"grad_scale": conditions.divisor, "found_inf": conditions.skip}
    for name, value in values.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(optimizer, name)


def take_back(optimizer: Optimizer) -> None:
    """The last step was skipped by its conditions: do not count it; torch's own count on the device."""
    if isinstance(optimizer, BatchOptimizer):
        optimizer.take_back()
