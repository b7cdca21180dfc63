"""`FusedAdam`: Adam and AdamW for parameters on any device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed.ops.adam.one_pass import adam_one_pass_, takes_one_pass
from deepspeed.ops.adam.rule import AdamRule, adam_, takes_conditions
from deepspeed.ops.moments import moment_width
from deepspeed.ops.optimizer import Batch, BatchOptimizer, Closure, Group, check_hyperparameters, refuse

__all__ = ["FusedAdam"]


class FusedAdam(BatchOptimizer):
    """AdamW, or Adam with an L2 term if `adam_w_mode` is false; moments have the dtype of their parameter.

    `moment_bits` chooses itself: 32, 16 (bfloat16), or 8 (block-wise, a quarter of the memory of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "set_grad_none")

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
        check_hyperparameters("FusedAdam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
        self.moment_bits = moment_width("FusedAdam", moment_bits)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to zero where `set_grad_none` is false."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(
        self,
        closure: Closure | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        refuse(
            "FusedAdam.step",
            grads=grads,
            output_params=output_params,
            scale=scale,
            grad_norms=grad_norms,
            grad_scaler=grad_scaler,
        )
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        group.setdefault("step", 0)
        super()._update_group(group)

    def _apply(self, group: Group, batch: Batch) -> None:
        rule, device = AdamRule.of(group, decoupled=self.adam_w_mode), batch.params[0].device
        step = adam_one_pass_ if batch.scales or self.takes_one_pass(device) else adam_
        step(batch, rule, self._conditions_on(device))

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`."""
        return takes_one_pass(device)

    def takes_conditions(self, device: torch.device) -> bool:
        """See `BatchOptimizer`; torch's own kernels take conditions, too."""
        return self.takes_one_pass(device) or (takes_conditions(device) and self.moment_bits != 8)
