"""Adam and AdamW: for parameters on the accelerator, and for parameters on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, has_kernel, register_on_host, register_one_pass
from deepspeed.ops.moments import Group, wide
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import Closure, ParameterBatch, TensorLists, contiguous, evaluate, widely
from deepspeed.ops.precompile import is_placeholder
from deepspeed.ops.registry import implements, op, reference
from deepspeed.ops.rule_optimizers import DeviceOptimizer, HostOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

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


class FusedAdam(DeviceOptimizer):
    """AdamW, or Adam with an L2 term if `adam_w_mode` is false; moments have the dtype of their parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "set_grad_none")
    rule: ClassVar[BatchRule] = ADAM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        moment_bits: int | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True)")
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._set_up(params, defaults | {"weight_decay": weight_decay}, moment_bits)

    def _rule_of(self, group: Group) -> AdamRule:
        return AdamRule.of(group, decoupled=self.adam_w_mode)

    def takes_one_pass(self, device: torch.device) -> bool:
        return takes_one_pass(device)

    def takes_conditions(self, device: torch.device) -> bool:
        """See `BatchOptimizer`; torch's own kernels take conditions, too."""
        return self.takes_one_pass(device) or (takes_conditions(device) and self.moment_bits != 8)


@dataclass(frozen=True, slots=True)
class _Before:
    """A parameter as it was before a step; `state` is None if it had none."""

    param: Tensor
    value: Tensor
    state: dict[str, Any] | None


class DeepSpeedCPUAdam(HostOptimizer):
    """AdamW, or Adam with an L2 term if `adamw_mode` is false, of parameters on the CPU.

    Moments are float32 whatever the dtype of the parameters, or have that dtype if `fp32_optimizer_states` is false.
    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "fp32_optimizer_states")
    rule: ClassVar[BatchRule] = ADAM

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        moment_bits: int | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("DeepSpeedCPUAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True)")
        self.adam_w_mode = bool(adamw_mode)
        self.fp32_optimizer_states = fp32_optimizer_states
        self._before: dict[int, list[_Before]] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        switches = {"bias_correction": bias_correction, "amsgrad": False}
        self._set_up(model_params, defaults | switches, moment_bits)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._before = {}

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        self._before.clear()
        return super().step(closure)

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Closure | None = None) -> Any:
        """Update the parameters of one group, keeping what `rollback_subgroup` needs: a copy of them and their state.

        The copy lives until the group's next step, `rollback_subgroup` or `step`.
        """
        group = self._subgroup(subgroup_id)
        loss = evaluate(closure)
        self._check([group])
        self._before[subgroup_id] = [
            _Before(param, param.detach().clone(), _copied(self.state.get(param)))
            for param in group["params"]
            if self._gradient(param) is not None
        ]
        self._update_group(group)
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Closure | None = None) -> Any:
        """Take back the group's last `step_subgroup`: parameters and state are bit for bit what they were.

        What a `one_pass` has written elsewhere stays there.
        """
        self._subgroup(sub_group_id)
        if sub_group_id not in self._before:
            raise RuntimeError(
                f"subgroup {sub_group_id} has no step to roll back: step_subgroup({sub_group_id}) was not its last "
                "step, or the step was rolled back or committed already"
            )
        for before in self._before.pop(sub_group_id):
            before.param.copy_(before.value)
            if before.state is None:
                self.state.pop(before.param, None)
                continue
            state = self.state[before.param]
            for name, value in before.state.items():
                # Into the tensors that are there: others may hold them.
                state[name] = state[name].copy_(value) if isinstance(value, Tensor) else value
        return evaluate(closure)

    def _subgroup(self, index: int) -> Group:
        if not 0 <= index < len(self.param_groups):
            raise IndexError(f"there is no subgroup {index}: the optimizer has {len(self.param_groups)} param groups")
        return self.param_groups[index]

    def _rule_of(self, group: Group) -> AdamRule:
        return AdamRule.of(group, decoupled=self.adam_w_mode)


def _copied(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if not state:
        return None
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
