"""`FusedLamb`: LAMB for parameters on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, has_kernel, update_
from deepspeed.ops.lamb.rule import LAMB, LambRule
from deepspeed.ops.moments import Group
from deepspeed.ops.multi_tensor import global_norm
from deepspeed.ops.optimizer import Closure, refuse
from deepspeed.ops.rule_optimizers import RuleOptimizer

__all__ = ["FusedLamb"]


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
