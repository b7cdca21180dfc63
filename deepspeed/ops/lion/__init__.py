"""Lion: for parameters on the accelerator, and for parameters on the CPU.

u = sign(β1·m + (1−β1)·g);  p ← p·(1 − lr·decay) − lr·u;  m ← β2·m + (1−β2)·g
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, register_on_host, register_one_pass
from deepspeed.ops.moments import Group, wide
from deepspeed.ops.optimizer import ParameterBatch, TensorLists, widely
from deepspeed.ops.registry import implements, reference
from deepspeed.ops.rule_optimizers import DeviceOptimizer, HostOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True)
class LionRule:
    """The numbers of one update."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> LionRule:
        """The rule of a parameter group."""
        beta1, beta2 = group["betas"]
        return cls(float(group["lr"]), beta1, beta2, group["weight_decay"])


@reference("lion")
@torch.no_grad()
def lion_reference(params: Tensors, grads: Tensors, exp_avgs: Tensors, rule: LionRule) -> None:
    """Tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    for param, grad, exp_avg in zip(params, grads, exp_avgs, strict=True):
        dtype = wide(param.dtype)
        p, g, m = (tensor.to(dtype) for tensor in (param, grad, exp_avg))
        direction = m.lerp(g, 1 - rule.beta1).sign()
        param.copy_(p * (1 - rule.lr * rule.weight_decay) - rule.lr * direction)
        exp_avg.copy_(m.lerp(g, 1 - rule.beta2))


def _numbers(batch: ParameterBatch, rule: LionRule) -> tuple[float, ...]:
    return (1 - rule.lr * rule.weight_decay, 1 - rule.beta1, 1 - rule.beta2, rule.lr)


LION = BatchRule("lion", oracle=lion_reference, signed=(True,), arguments=lambda batch, rule: (rule,), numbers=_numbers)
"""Lion for whole batches."""


@implements("lion", name="foreach")
@torch.no_grad()
def _lion_foreach(params: Tensors, grads: Tensors, exp_avgs: Tensors, rule: LionRule) -> None:
    def update(lists: TensorLists) -> None:
        p, g, m = lists
        directions = torch._foreach_lerp(m, g, 1 - rule.beta1)
        torch._foreach_sign_(directions)
        if rule.weight_decay:
            torch._foreach_mul_(p, 1 - rule.lr * rule.weight_decay)
        torch._foreach_add_(p, directions, alpha=-rule.lr)
        torch._foreach_lerp_(m, g, 1 - rule.beta2)

    widely(update, (params, grads, exp_avgs))


register_on_host(LION)
ONE_PASS = register_one_pass(LION)


class FusedLion(DeviceOptimizer):
    """Lion with decoupled weight decay; the momentum has the dtype of its parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    rule: ClassVar[BatchRule] = LION

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        moment_bits: int | None = None,
    ) -> None:
        self.set_grad_none = set_grad_none
        self._set_up(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, moment_bits)

    def _rule_of(self, group: Group) -> LionRule:
        return LionRule.of(group)


class DeepSpeedCPULion(HostOptimizer):
    """Lion with decoupled weight decay, of parameters on the CPU.

    The momentum is float32, or has the dtype of its parameter if `fp32_optimizer_states` is false; `moment_bits`
    chooses itself: 32, 16 (bfloat16) or 8 (block-wise). `adamw_mode` is there for client libraries that hand it to
    every CPU optimizer: Lion's decay is decoupled either way.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    rule: ClassVar[BatchRule] = LION

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        *,
        adamw_mode: bool | None = None,
        moment_bits: int | None = None,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self._set_up(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, moment_bits)

    def _rule_of(self, group: Group) -> LionRule:
        return LionRule.of(group)
