"""`ZeroOneAdam`: 0/1 Adam, which exchanges gradients as signs between ever rarer updates of the variance.

Until `var_freeze_step` the variance is updated with the mean gradient every `var_interval` steps, a number that doubles
after each `var_update_scaler` updates; in between, the momentum is advanced with the mean of signs of gradients. After
it the variance stays, and ranks take steps of their own with their own gradients. Every `local_step_interval` steps,
a number that doubles after each `local_step_scaler` steps up to `local_step_clipper`, they undo these and take the
mean of signs of what they did together, from which the momentum follows.

[Note: no local steps] A rank that steps alone needs the whole variance, and a momentum and a sum of its own for every
parameter. Where ranks own pieces, `local_step_clipper` has to be 1: each step ends with an exchange. What a rank did
since the last one is then its momentum times lr / (1 − β1ᵗ), so signs of that are exchanged in place of sums, and only
the owner adds decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.adam import ADAM, AdamRule
from deepspeed.ops.batch_rule import BatchRule
from deepspeed.ops.moments import Group
from deepspeed.ops.onebit.adam import corrections, denominator
from deepspeed.ops.onebit.base import OneBitOptimizer, gradient_of, masked

__all__ = ["ZeroOneAdam"]

_FIRST = {"var_interval": 1, "var_counter": 0, "local_step_interval": 1, "local_step_counter": 0}


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam, with decoupled weight decay. `deepspeed`, `cuda_aware` and the name of a backend change nothing."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "momentum_accumulator")
    settings: ClassVar[tuple[str, ...]] = (
        *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
        *("steps", "schedule"),
    )
    rule: ClassVar[BatchRule] = ADAM

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        refused = {"eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad}
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self.schedule = dict(_FIRST)
        """The intervals and how far they are; each parameter's state says the same."""
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        whole = {
            "var_freeze_step": (var_freeze_step, 0),
            "var_update_scaler": (var_update_scaler, 1),
            "local_step_scaler": (local_step_scaler, 1),
            "local_step_clipper": (local_step_clipper, 1),
        }
        self._begin_as(params, defaults | {"weight_decay": weight_decay}, refused, comm_backend_name, whole)

    @property
    def frozen(self) -> bool:
        """The variance stays."""
        return self.steps > self.var_freeze_step

    @property
    def local(self) -> bool:
        return self.exchange is not None and (self.frozen or not self._due("var_interval"))

    def _due(self, interval: str) -> bool:
        return (self.steps + 1) % self.schedule[interval] == 0

    def _rule_of(self, group: Group) -> AdamRule:
        return AdamRule.of(group, decoupled=True)

    def _settled(self, state: Mapping[str, Any]) -> bool:
        return int(state.get("var_updates", 0)) > 0

    def _warm(self, group: Group) -> None:
        """An update of the variance, too."""
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "step" not in state:
                self._begin(group, param, state, self.moments)
                state.update(_FIRST, lrs=0.0, var_updates=0)
            state["step"] += 1
            state["var_updates"] += 1
            state["exp_avg"].lerp_(param.grad, 1 - group["betas"][0])
            state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(param.grad, param.grad, value=1 - group["betas"][1])
            self._move(group, param)

    def _update(self) -> None:
        if not self.frozen and self._due("var_interval"):
            for group in self.param_groups:
                self._warm(group)
        else:
            divided = self._divide()
            for group, _, others in divided:
                self._warm_others(group, others)
            members = [(group, param) for group, settled, _ in divided for param in settled]
            for _, param in members:
                self.state[param]["step"] += 1
            if self.frozen and self.exchange is not None and self.exchange.owned:
                self._step_together(members)
            elif self.frozen:
                self._step_locally(members)
            else:
                self._step_by_signs(members)
        self._count()

    def _step_by_signs(self, members: list[tuple[Group, Tensor]]) -> None:
        """The momentum is advanced with the mean of signs of gradients."""
        params = [param for _, param in members]
        if self.exchange is None:
            gradients = {param: gradient_of(param).to(torch.float32, copy=True) for param in params}
        else:
            gradients = self.exchange.mean_gradients(params)
        for group, param in members:
            self.state[param]["exp_avg"].lerp_(masked(group, gradients[param]).to(param.dtype), 1 - group["betas"][0])
            self._move(group, param)

    def _step_together(self, members: list[tuple[Group, Tensor]]) -> None:
        """See [Note: no local steps]."""
        self._advance_momenta([(group, param, self.state[param]["exp_avg"]) for group, param in members])
        for group, param in members:
            self._move(group, param)

    def unit_of(self, group: Mapping[str, Any]) -> float:
        """By how much a momentum moves parameters, but for their variance; a momentum that does not is as it is."""
        return float(group["lr"] / corrections(group, self.steps + 1, 1)[0]) or 1.0

    def _step_locally(self, members: list[tuple[Group, Tensor]]) -> None:
        """A step of this rank alone; all of them come together where it is due."""
        for group, param in members:
            state = self.state[param]
            state["exp_avg"].lerp_(gradient_of(param), 1 - group["betas"][0])
            state["lrs"] += group["lr"] / corrections(group, state["step"], state["var_updates"])[0]
            state["momentum_accumulator"].add_(self._move(group, param))
        if self._due("local_step_interval"):
            self._come_together(members)

    def _come_together(self, members: list[tuple[Group, Tensor]]) -> None:
        """Undo steps of this rank, and take the mean of those of all."""
        sums: dict[Any, Tensor] = {}
        for group, param in members:
            state = self.state[param]
            param.sub_(state["momentum_accumulator"])
            sums[param] = state["momentum_accumulator"].mul_(self._denominator(group, state))
        self._exchanged(sums)
        for group, param in members:
            state, total = self.state[param], masked(group, sums[param])
            state["exp_avg"].copy_(total / -state["lrs"])
            param.add_(total / self._denominator(group, state))
            total.zero_()
            state["lrs"] = 0.0

    def synchronise(self) -> None:
        """Bring ranks together that are between two exchanges; all call it.

        Undoing a step rounds, on each rank in its own way, so the mean is taken of parameters, too.
        """
        held = [(group, param) for group in self.param_groups for param in self._divided(group)[0]]
        if self.exchange is None or self.exchange.owned or not self.frozen:
            return
        with torch.no_grad():
            if any(self.state[param]["lrs"] for _, param in held):
                self._come_together(held)
            self.exchange.exact_mean([param.detach() for _, param in held])

    def _denominator(self, group: Group, state: Mapping[str, Any]) -> Tensor:
        correction = corrections(group, state["step"], state["var_updates"])[1]
        return denominator(group, state["exp_avg_sq"], correction)

    def _move(self, group: Group, param: Tensor) -> Tensor:
        """A step of a parameter with its moments; returns by what it moved."""
        state = self.state[param]
        correction = corrections(group, state["step"], state["var_updates"])[0]
        update = state["exp_avg"] / correction / self._denominator(group, state)
        moved: Tensor = update.add_(param, alpha=group["weight_decay"]).mul_(-group["lr"])
        param.add_(moved)
        return moved

    def _count(self) -> None:
        schedule = self.schedule
        if self.frozen:
            schedule["local_step_counter"] += 1
            if schedule["local_step_counter"] == self.local_step_scaler:
                doubled = 2 * schedule["local_step_interval"]
                schedule.update(local_step_counter=0, local_step_interval=min(self.local_step_clipper, doubled))
        elif self._due("var_interval"):
            schedule["var_counter"] += 1
            if schedule["var_counter"] == self.var_update_scaler:
                schedule.update(var_counter=0, var_interval=2 * schedule["var_interval"])
        if self.exchange is not None and self.steps == self.var_freeze_step:
            self.exchange.forget()  # what signs left out of gradients says nothing of steps
        for state in self.state.values():
            state.update(schedule)

    def counts(self) -> list[int]:
        return [*super().counts(), *self.schedule.values()]

    def resume(self, counts: Sequence[int]) -> None:
        super().resume(counts)
        self.schedule = dict(zip(_FIRST, counts[1:], strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `OneBitOptimizer`; the intervals are those of the states."""
        super().load_state_dict(state_dict)
        latest: Mapping[str, Any] = max(self.state.values(), key=lambda state: int(state.get("step", 0)), default={})
        self.schedule = {name: int(latest.get(name, first)) for name, first in _FIRST.items()}
