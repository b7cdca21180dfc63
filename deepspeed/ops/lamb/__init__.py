"""LAMB: Adam with a trust ratio per parameter, for large batches.

g ← g / scale;  m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²
u = m / (√v + eps) + decay·p                             √(v + eps) if `eps_inside_sqrt`
coefficient = ‖p‖ / ‖u‖ within [min, max]                1 where a norm is 0
p ← p − lr·√(1−β2ᵗ)/(1−β1ᵗ)·coefficient·u                the middle factor only with bias correction
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, has_kernel, register_one_pass, update_
from deepspeed.ops.moments import Group, wide
from deepspeed.ops.multi_tensor import global_norm
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import Closure, ParameterBatch, TensorLists, refuse, widely
from deepspeed.ops.registry import implements, reference
from deepspeed.ops.rule_optimizers import RuleOptimizer

__all__ = ["FusedLamb"]

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True)
class LambRule:
    """The numbers of one update; gradients are divided by `scale`, a number or a 0-dim tensor."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    scale: float | Tensor = 1.0

    @classmethod
    def of(cls, group: Mapping[str, Any], *, eps_inside_sqrt: bool, scale: float | Tensor) -> LambRule:
        """The rule of a parameter group."""
        beta1, beta2 = group["betas"]
        same = ("eps", "weight_decay", "max_coeff", "min_coeff", "bias_correction")
        return cls(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps_inside_sqrt=eps_inside_sqrt,
            scale=scale,
            **{name: group[name] for name in same},
        )

    def step_size(self, step: int) -> float:
        """The learning rate with the bias correction of both moments."""
        if not self.bias_correction:
            return self.lr
        return self.lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)

    def coefficients(self, weights: Tensor, updates: Tensor) -> Tensor:
        """Trust ratios of norms."""
        ratios = (weights / updates).clamp(self.min_coeff, self.max_coeff)
        return torch.where((weights != 0) & (updates != 0), ratios, torch.ones_like(ratios))


@reference("lamb")
@torch.no_grad()
def lamb_reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: int, rule: LambRule
) -> list[Tensor]:
    """Tensor by tensor, computed in float32 (float64 for float64) and rounded once."""
    coefficients = []
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        dtype = wide(param.dtype)
        p, g, m, v = (tensor.to(dtype) for tensor in (param, grad, exp_avg, exp_avg_sq))
        g = g / rule.scale
        m = m.lerp(g, 1 - rule.beta1)
        v = rule.beta2 * v + (1 - rule.beta2) * g * g
        denominator = (v + rule.eps).sqrt() if rule.eps_inside_sqrt else v.sqrt() + rule.eps
        update = m / denominator + rule.weight_decay * p
        coefficient = rule.coefficients(torch.linalg.vector_norm(p), torch.linalg.vector_norm(update))
        coefficients.append(coefficient)
        for target, result in ((param, p - rule.step_size(step) * coefficient * update), (exp_avg, m), (exp_avg_sq, v)):
            target.copy_(result)
    return coefficients


def _numbers(batch: ParameterBatch, rule: LambRule) -> tuple[float, ...]:
    roots = (rule.eps, 0.0) if rule.eps_inside_sqrt else (0.0, rule.eps)
    moments = (1 - rule.beta1, rule.beta2, 1 - rule.beta2)
    return (*moments, *roots, rule.weight_decay, rule.step_size(batch.step))


LAMB = BatchRule(
    "lamb",
    oracle=lamb_reference,
    signed=(True, False),
    arguments=lambda batch, rule: (batch.step, rule),
    numbers=_numbers,
)
"""LAMB for whole batches."""


@implements("lamb", name="foreach")
@torch.no_grad()
def _lamb_foreach(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: int, rule: LambRule
) -> list[Tensor]:
    def update(lists: TensorLists) -> list[Tensor]:
        p, g, m, v = lists
        if isinstance(rule.scale, Tensor) or rule.scale != 1:
            g = list(torch._foreach_div(g, rule.scale))
        torch._foreach_lerp_(m, g, 1 - rule.beta1)
        torch._foreach_mul_(v, rule.beta2)
        torch._foreach_addcmul_(v, g, g, 1 - rule.beta2)
        if rule.eps_inside_sqrt:
            denominators = torch._foreach_add(v, rule.eps)
            torch._foreach_sqrt_(denominators)
        else:
            denominators = torch._foreach_sqrt(v)
            torch._foreach_add_(denominators, rule.eps)
        updates = list(torch._foreach_div(m, denominators))
        if rule.weight_decay:
            torch._foreach_add_(updates, p, alpha=rule.weight_decay)
        norms = (torch.stack(list(torch._foreach_norm(tensors))) for tensors in (p, updates))
        coefficients = list(rule.coefficients(*norms).unbind())
        torch._foreach_mul_(updates, coefficients)
        torch._foreach_add_(p, updates, alpha=-rule.step_size(step))
        return coefficients

    # The trust ratio is one of the whole parameter, so none may be cut.
    parts = widely(update, (params, grads, exp_avgs, exp_avg_sqs), elementwise=False)
    return [coefficient for part in parts for coefficient in part]


def _kernels(batch: ParameterBatch, rule: LambRule, conditions: Conditions | None) -> list[list[Tensor]]:
    """Two passes, as few as the norms of whole tensors allow: the first advances the moments and sums the squares of
    weights and updates, the second computes the updates again from what it reads anyway. Moments in 8 bits are advanced
    by the second, which reads the gradient again: written by the first they would be rounded before they are used.
    """
    from deepspeed.ops.kernels.many import Columns, Launch, launch, programs_of, trust_ratios

    device, factor = batch.params[0].device, batch.factor
    if isinstance(rule.scale, Tensor):
        given = Conditions(rule.scale, torch.zeros((), device=device)) if conditions is None else conditions
        conditions = given if conditions is None else Conditions(given.divisor * rule.scale, given.skip)
    else:
        factor /= rule.scale
    columns, numbers = Columns.of(batch), LAMB.numbers(batch, rule)
    partial = torch.zeros(programs_of(columns), 2, device=device)
    launch(columns, Launch("lamb_moments", numbers, factor, conditions=conditions, beside=partial))
    coefficients = trust_ratios(columns, partial, rule.min_coeff, rule.max_coeff)
    launch(columns, Launch("lamb_apply", numbers, factor, batch.step, conditions, coefficients))
    return [list(coefficients.unbind())]


ONE_PASS = register_one_pass(LAMB, _kernels)


class FusedLamb(RuleOptimizer):
    """LAMB; each parameter's step is scaled by ‖w‖ / ‖update‖, kept within `min_coeff` and `max_coeff`.

    A `max_grad_norm` above 0 clips the norm of all gradients of a parameter group. `moment_bits` chooses what holds the
    moments: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("eps_inside_sqrt",)
    rule: ClassVar[BatchRule] = LAMB

    _scale: float = 1.0
    _coefficients: Sequence[Tensor] = ()
    """Of the last step; a copied or unpickled optimizer has none."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        moment_bits: int | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant; leave amsgrad out")
        amounts = {"max_grad_norm": max_grad_norm, "max_coeff": max_coeff, "min_coeff": min_coeff}
        self.eps_inside_sqrt = eps_inside_sqrt
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._set_up(params, defaults | {"weight_decay": weight_decay, **amounts}, moment_bits)
        if min_coeff > max_coeff:
            raise ValueError(f"FusedLamb: min_coeff {min_coeff} is above max_coeff {max_coeff}")

    def step(
        self,
        closure: Closure | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Update every parameter that has a gradient, divided by `scale`; returns what `closure` returns."""
        refuse("FusedLamb.step", grads=grads, output_params=output_params, grad_norms=grad_norms)
        if not scale > 0:
            raise ValueError(f"FusedLamb.step: scale is {scale}; gradients are divided by it, it must be above 0")
        self._scale = scale
        self._coefficients = ()
        return self._step(closure)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, one for each parameter that it updated."""
        return [float(coefficient) for coefficient in self._coefficients]

    def _update_group(self, group: Group) -> None:
        scale = self._clipped(group)
        found: dict[Tensor, Tensor] = {}
        for batch in self._batches(group, self.moments):
            device = batch.params[0].device
            divisor = scale.to(device) if isinstance(scale, Tensor) else scale
            rule = LambRule.of(group, eps_inside_sqrt=self.eps_inside_sqrt, scale=divisor)
            results = update_(LAMB, batch, rule, self._conditions_on(device), one_pass=self.takes_one_pass(device))
            ratios = chain.from_iterable(results)  # where the step was skipped there may be none
            found.update(zip(batch.params, ratios, strict=False))
        ratios_in_order = [found[param] for param in group["params"] if param in found]
        self._coefficients = [*self._coefficients, *ratios_in_order]

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`; the norm of a group, where it is clipped, is that of gradients of their true size."""
        return has_kernel(LAMB, device) and not any(group["max_grad_norm"] for group in self.param_groups)

    def _clipped(self, group: Group) -> float | Tensor:
        """What the group's gradients are divided by: the given scale, and more where their norm is too large."""
        if not group["max_grad_norm"]:
            return self._scale
        norm = global_norm(param.grad for param in group["params"] if param.grad is not None)
        # A tensor, not a number: the device is not waited for.
        return torch.clamp(norm / group["max_grad_norm"], min=self._scale)
