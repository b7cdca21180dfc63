"""What optimizers have in common that exchange signs of what they make of gradients, in place of the gradients.

[Note: local gradients] While `local` is true, gradients stay on the ranks that computed them. An optimizer then gives
its `exchange` what takes their place. All ranks give the same tensors in the same order: a parameter without a gradient
counts as one whose gradient is zero, and one that has no variance yet has its gradient averaged as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.ops.moments import Group
from deepspeed.ops.optimizer import Closure, evaluate
from deepspeed.ops.rule_optimizers import DeviceOptimizer

_BACKENDS = ("ccl", "compressed", "gloo", "hccl", "mpi", "nccl")


class MomentumExchange(Protocol):
    """Means over the ranks that train the same parameters; all of them call the same methods in the same order."""

    def sign_mean(self, values: Mapping[Any, Tensor]) -> None:
        """Replace tensors by their mean as signs tell it; errors are kept by the key, a parameter or a name."""

    def exact_mean(self, values: Sequence[Tensor]) -> None:
        """Replace tensors by their mean."""

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are true on any rank."""

    def forget(self) -> None:
        """Begin anew with errors of zero."""


class OneBitOptimizer(DeviceOptimizer):
    """Base of the optimizers; `exchange` is given by an engine of several ranks, and is None on one."""

    exchange: MomentumExchange | None = None

    steps: int = 0
    """Taken so far."""

    def _begin_as(self, params: Any, defaults: dict[str, Any], refused: Mapping[str, Any], backend: str) -> None:
        name = type(self).__name__
        for key, value in refused.items():
            if value:
                raise RuntimeError(f"{name}: {key} is {value!r}, but it has no such variant; leave the argument out")
        if backend not in _BACKENDS:
            raise ValueError(f"{name}: comm_backend_name is {backend!r}; use one of {', '.join(_BACKENDS)}")
        self._set_up(params, defaults, None)

    @property
    def local(self) -> bool:
        """Whether the next gradients stay on their ranks: [Note: local gradients]."""
        return False

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`: what is exchanged is computed first."""
        return False

    def _step(self, closure: Closure | None, groups: Sequence[Group] | None = None) -> Any:
        """See `BatchOptimizer`; all groups together."""
        loss = evaluate(closure)
        self._check(self.param_groups)
        with torch.no_grad():
            self._update()
        self.steps += 1
        return loss

    def _update(self) -> None:
        raise TypeError(f"{type(self).__name__} defines no update rule")

    def _warm(self, group: Group) -> None:
        """A step with a variance that follows the gradients."""
        self._update_group(group)

    def _settled(self, state: Mapping[str, Any]) -> bool:
        """Whether a parameter has the variance that stays."""
        raise TypeError(f"{type(self).__name__} defines no update rule")

    def _divided(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """(those of a group with a variance that stays, the others): the same on all ranks."""
        settled = [
            param
            for param in group["params"]
            if not group.get("non_freeze") and self._settled(self.state.get(param, {}))
        ]
        known = set(settled)
        return settled, [param for param in group["params"] if param not in known]

    def _warm_others(self, group: Group, others: list[Tensor]) -> None:
        """A step with the mean gradient of parameters whose variance does not stay yet."""
        everything, exchange = group["params"], self.exchange
        if exchange is not None and others:
            had = exchange.any_of([param.grad is not None for param in others])
            others = [param for param, present in zip(others, had, strict=True) if present]
            for param in others:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            exchange.exact_mean([param.grad for param in others if param.grad is not None])
        try:
            group["params"] = others
            self._warm(group)
        finally:
            group["params"] = everything

    def _gradient_of(self, param: Tensor) -> Tensor:
        return torch.zeros_like(param) if param.grad is None else param.grad

    def _exchanged(self, values: Mapping[Any, Tensor]) -> None:
        """Means of signs of tensors of any shape, in place."""
        if self.exchange is None or not values:
            return
        flat = {key: value.reshape(-1).to(torch.float32, copy=True) for key, value in values.items()}
        self.exchange.sign_mean(flat)
        for key, value in values.items():
            value.copy_(flat[key].view(value.shape))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `MomentKeeper`; errors of an exchange begin anew, until a checkpoint brings those of its rank."""
        super().load_state_dict(state_dict)
        self.steps = max((int(state.get("step", 0)) for state in self.state.values()), default=0)
        if self.exchange is not None:
            self.exchange.forget()


def masked(group: Group, value: Tensor) -> Tensor:
    """Signs cannot say zero, so a group may have a mask of elements that stay zero (`exp_avg_mask`)."""
    mask = group.get("exp_avg_mask")
    return value if mask is None else value.mul_(mask.to(value.device, value.dtype).view(value.shape))
