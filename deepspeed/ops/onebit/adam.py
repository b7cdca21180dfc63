"""`OnebitAdam`: Adam for `freeze_step` steps; then the variance stays, and momenta are exchanged as signs.

m ← mean of signs(β1·m + (1−β1)·g);  p ← p − lr·(m / (1−β1ᵗ) / (√(v / (1−β2ᶠ)) + eps) + decay·p)
with t steps so far and f of them before the variance stayed; both divisors only with bias correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.adam import ADAM, AdamRule
from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.moments import Group
from deepspeed.ops.onebit.base import Member, OneBitOptimizer, masked

__all__ = ["OnebitAdam"]


class OnebitAdam(OneBitOptimizer):
    """1-bit Adam, with decoupled weight decay. `deepspeed`, `cuda_aware` and the name of a backend change nothing."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("freeze_step", "steps")
    rule: ClassVar[BatchRule] = ADAM

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        refused = {"eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad}
        self.freeze_step = freeze_step
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._begin_as(
            params,
            defaults | {"weight_decay": weight_decay},
            refused,
            comm_backend_name,
            {"freeze_step": (freeze_step, 0)},
        )

    def _rule_of(self, group: Group) -> AdamRule:
        return AdamRule.of(group, decoupled=True)

    def _update(self) -> None:
        if self.steps < self.freeze_step:
            for group in self.param_groups:
                self._warm(group)
            return
        members: list[Member] = []
        for group, settled, others in self._divide():
            self._warm_others(group, others)
            members += [(group, param, self.state[param]["exp_avg"]) for param in settled]
        self._advance_momenta(members)
        for group, param, momentum in members:
            state = self.state[param]
            state["step"] += 1
            correct = corrections(group, state["step"], self.freeze_step)
            update = masked(group, momentum) / correct[0] / denominator(group, state["exp_avg_sq"], correct[1])
            param.sub_(update.add_(param, alpha=group["weight_decay"]), alpha=group["lr"])


def corrections(group: Mapping[str, Any], step: int, updates: int) -> tuple[float, float]:
    """What momentum and variance are divided by after so many steps, and so many updates of the variance."""
    beta1, beta2 = group["betas"]
    return (1 - beta1**step, 1 - beta2**updates) if group["bias_correction"] else (1.0, 1.0)


def denominator(group: Group, variance: Tensor, correction: float) -> Tensor:
    """The root of a corrected variance, and eps."""
    return torch.sqrt(variance / correction).add_(group["eps"])
