"""`FusedAdam`: Adam and AdamW for parameters on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from deepspeed.ops.adam.one_pass import adam_one_pass_, takes_one_pass
from deepspeed.ops.adam.rule import AdamRule, Conditions, adam_, takes_conditions
from deepspeed.ops.optimizer import Batch, BatchOptimizer, Closure, Group, check_hyperparameters, refuse

__all__ = ["FusedAdam"]


class FusedAdam(BatchOptimizer):
    """AdamW, or Adam with an L2 term if `adam_w_mode` is false; moments have the dtype of their parameter."""

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
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad variant; use torch.optim.AdamW(amsgrad=True)")
        check_hyperparameters("FusedAdam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
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
        if self.conditions is not None:
            stepped = [self.state[param] for param in group["params"] if self._gradient(param) is not None]
            self.counted = [*self.counted, *stepped]

    def _apply(self, group: Group, batch: Batch) -> None:
        rule, device = AdamRule.of(group, decoupled=self.adam_w_mode), batch.params[0].device
        conditions = None if self.conditions is None else self.conditions.on(device)
        if self.takes_one_pass(device):
            adam_one_pass_(batch, rule, conditions)
        else:
            adam_(batch, rule, conditions)

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`."""
        return takes_one_pass(device)

    conditions: Conditions | None = None
    """Under which the next steps are taken; set and cleared by whoever takes them."""

    counted: Sequence[dict[str, Any]] = ()
    """The states whose steps were counted under these conditions."""

    @contextmanager
    def under(self, conditions: Conditions) -> Iterator[None]:
        """Steps that are taken inside obey these conditions; `take_back` undoes their count."""
        self.conditions, self.counted = conditions, []
        try:
            yield
        finally:
            self.conditions = None

    def takes_conditions(self, device: torch.device) -> bool:
        """True if a step over parameters on `device` can be taken under `conditions`.

        The answer is the same on all ranks, whatever each of them holds, and also for one that holds nothing.
        """
        return self.takes_one_pass(device) or takes_conditions(device)

    def take_back(self) -> None:
        """The last step was skipped by its conditions: do not count it."""
        for state in self.counted:
            state["step"] -= 1
        self.counted = ()
