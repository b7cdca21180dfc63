"""`Muon` and `SingleDeviceMuon`: every parameter is a matrix."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.muon.newton_schulz import check_ns_method
from deepspeed.ops.muon.update import MuonRule, heads_of, muon_updates
from deepspeed.ops.muon.whole import Whole, fragment_updates
from deepspeed.ops.optimizer import BatchOptimizer, Closure, Group, check_hyperparameters

__all__ = ["Muon", "SingleDeviceMuon", "update_matrices"]


class SingleDeviceMuon(BatchOptimizer):
    """Momentum whose matrices are made orthogonal, with decoupled weight decay."""

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    whole: Whole | None = None
    """Set where the parameters are fragments of matrices."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        check_hyperparameters(type(self).__name__, lr=lr, weight_decay=weight_decay, momentum=momentum)
        check_ns_method(ns_method)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        super().__init__(params, defaults)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        update_matrices(group, self.state, self.state_dtype, self.whole)


class Muon(SingleDeviceMuon):
    """The same on many ranks: each computes every update from the reduced gradients, so no process group is needed."""


def update_matrices(group: Group, states: Any, dtype: torch.dtype | None, whole: Whole | None = None) -> None:
    """Muon's step of one parameter group; the state of a parameter is its `momentum_buffer`, in `dtype` or its own.

    Attention projections are cut into heads where the group has `num_heads`, or the parameter `muon_num_heads`. With
    `whole` the parameters are fragments, and all ranks take part.
    """
    params = [param for param in group["params"] if param.grad is not None and param.numel()]
    for param in params:
        if "momentum_buffer" not in states[param]:
            states[param]["momentum_buffer"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    momenta = [states[param]["momentum_buffer"] for param in params]
    rule = MuonRule(beta=group["momentum"], ns_method=group["ns_method"])
    lr = float(group["lr"])
    if whole is None:
        heads = [heads_of(group, param) for param in params]
        updates = muon_updates([param.grad for param in params], momenta, heads, rule)
    else:
        updates = fragment_updates(whole, group, params, momenta, rule)
    for place, update in updates:
        _apply(params[place], update, lr, 1 - lr * group["weight_decay"])


def _apply(param: Tensor, update: Tensor, lr: float, keep: float) -> None:
    """param ← keep·param − lr·update; 16-bit parameters in one rounding."""
    if param.dtype in (torch.float16, torch.bfloat16):
        param.copy_(keep * param.float() - lr * update.float())
        return
    if keep != 1:
        param.mul_(keep)
    param.add_(update, alpha=-lr)
