"""`DeepSpeedCPUAdam`: Adam and AdamW for parameters in host memory, with steps that can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.adam.rule import ADAM, AdamRule
from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.moments import Group
from deepspeed.ops.optimizer import Closure, evaluate
from deepspeed.ops.rule_optimizers import HostOptimizer

__all__ = ["DeepSpeedCPUAdam"]


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
