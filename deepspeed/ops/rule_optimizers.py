"""Optimizers of one update rule: what those of Adam, Lion, LAMB and Adagrad share, on a device and in host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed.ops.batch_rule import BatchRule, has_kernel, update_
from deepspeed.ops.moments import Group, moment_width
from deepspeed.ops.optimizer import BatchOptimizer, Closure, ParameterBatch, check_hyperparameters, refuse
from deepspeed.ops.registry import op

_SWITCHES = ("bias_correction", "amsgrad")


class RuleOptimizer(BatchOptimizer):
    """An optimizer whose parameters all follow one rule."""

    rule: ClassVar[BatchRule]

    def _set_up(self, params: Any, defaults: dict[str, Any], moment_bits: int | None) -> None:
        """Check the numbers of all groups, then as torch does."""
        name = type(self).__name__
        check_hyperparameters(name, **{key: value for key, value in defaults.items() if key not in _SWITCHES})
        self.moment_bits = moment_width(name, moment_bits)
        super().__init__(params, defaults)

    def _rule_of(self, group: Group) -> Any:
        """The numbers of an update of this group."""
        raise TypeError(f"{type(self).__name__} defines no update rule")


class DeviceOptimizer(RuleOptimizer):
    """Updates parameters on any device, in one pass over memory where there is a kernel for that."""

    set_grad_none: bool = True

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
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        refuse(f"{type(self).__name__}.step", **given, grad_scaler=grad_scaler)
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        group.setdefault("step", 0)
        super()._update_group(group)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        device = batch.params[0].device
        one_pass = self.takes_one_pass(device)
        update_(self.rule, batch, self._rule_of(group), self._conditions_on(device), one_pass=one_pass)

    def takes_one_pass(self, device: torch.device) -> bool:
        return has_kernel(self.rule, device)


class HostOptimizer(RuleOptimizer):
    """Updates parameters in host memory; `mixed`, those too that an engine keeps on its device."""

    settings: ClassVar[tuple[str, ...]] = ("fp32_optimizer_states",)
    cpu_only: ClassVar[bool] = True

    def _set_up(self, params: Any, defaults: dict[str, Any], moment_bits: int | None) -> None:
        op(f"cpu_{self.rule.name}")  # compiled now if it has to be, not by the first step
        super()._set_up(params, defaults, moment_bits)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        return self._step(closure)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        on_host = batch.params[0].device.type == "cpu"
        op(f"cpu_{self.rule.name}" if on_host else f"{self.rule.name}_one_pass")(batch, self._rule_of(group))
