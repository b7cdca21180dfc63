"""`Muon` and `SingleDeviceMuon`: every parameter is a matrix."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.moments import moment_width, scale_name
from deepspeed.ops.muon.momentum import Momenta, MomentumRule, advance_, directions_, takes_one_pass
from deepspeed.ops.muon.newton_schulz import check_ns_method
from deepspeed.ops.muon.update import MuonRule, alike, heads_of, orthogonal_or_nan
from deepspeed.ops.muon.whole import Whole, fragment_updates
from deepspeed.ops.optimizer import BatchOptimizer, Closure, Group, check_hyperparameters, wide

__all__ = ["Muon", "SingleDeviceMuon", "update_matrices"]


class SingleDeviceMuon(BatchOptimizer):
    """Momentum whose matrices are made orthogonal, with decoupled weight decay.

    `moment_bits` chooses what holds the momentum: 32, 16 (bfloat16), or 8 (block-wise, a quarter of float32).
    """

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
        *,
        moment_bits: int | None = None,
    ) -> None:
        self.moment_bits = moment_width(type(self).__name__, moment_bits)
        check_hyperparameters(type(self).__name__, lr=lr, weight_decay=weight_decay, momentum=momentum)
        check_ns_method(ns_method)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        super().__init__(params, defaults)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        update_matrices(self, group, self.whole)

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`."""
        return takes_one_pass(device)


class Muon(SingleDeviceMuon):
    """The same on many ranks: each computes every update from the reduced gradients, so no process group is needed."""


def update_matrices(optimizer: BatchOptimizer, group: Group, whole: Whole | None = None) -> None:
    """Muon's step of one parameter group; the state of a parameter is its `momentum_buffer`.

    Attention projections are cut into heads where the group has `num_heads`, or the parameter `muon_num_heads`. With
    `whole` the parameters are fragments, and all ranks take part.
    """
    momenta = _momenta(optimizer, group)
    rule = MuonRule(beta=group["momentum"], ns_method=group["ns_method"])
    lr = float(group["lr"])
    step = MomentumRule(rule.beta, rule.nesterov, lr, 1 - lr * group["weight_decay"])
    if whole is not None:
        for place, update in fragment_updates(whole, group, momenta, rule):
            advance_(momenta.some([place]), step, [update])
        return
    params = momenta.params
    heads = [heads_of(group, param) for param in params]
    keys = [(param.shape, param.dtype, param.device, heads[place]) for place, param in enumerate(params)]
    for places in alike(keys, params):
        some, first = momenta.some(places), params[places[0]]
        directions = torch.empty(len(places), *first.shape, dtype=wide(first.dtype), device=first.device)
        directions_(some, step, directions.unbind())
        updates = orthogonal_or_nan(directions, rule, num_heads=heads[places[0]])
        advance_(some, step, updates.unbind())


def _momenta(optimizer: BatchOptimizer, group: Group) -> Momenta:
    """What of a group is updated now."""
    found, besides = Momenta([], [], []), optimizer.one_pass
    coded: list[dict[str, Any]] = []
    for param in group["params"]:
        grad = optimizer._gradient(param)
        if grad is None or not param.numel():
            continue
        state = optimizer.state[param]
        if "momentum_buffer" not in state:
            _begin(optimizer, group, param)
        if scale_name("momentum_buffer") in state:
            # one that was loaded from a wider momentum was not counted so far
            state["step"] = state.get("step", 0) + 1
            found.scales.append(state[scale_name("momentum_buffer")])
            found.steps.append(state["step"])
            coded.append(state)
        found.params.append(param)
        found.grads.append(grad)
        found.momenta.append(state["momentum_buffer"])
        found.outs.append(None if besides is None else besides.out(param))
    found.factor = 1.0 if besides is None else besides.factor
    if found.params:
        found.conditions = optimizer._conditions_on(found.params[0].device)
    if found.conditions is not None:
        optimizer.counted = [*optimizer.counted, *coded]
    return found


def _begin(optimizer: BatchOptimizer, group: Group, param: Tensor) -> None:
    """The first state of a parameter; steps are counted where they are needed, for the rounding of codes."""
    state = optimizer.state[param]
    if optimizer.moment_bits == 8:
        optimizer._begin(group, param, state, ("momentum_buffer",))
        return
    state["momentum_buffer"] = torch.zeros_like(param, dtype=optimizer._state_dtype(param), requires_grad=False)
