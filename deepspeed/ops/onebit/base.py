"""What optimizers have in common that exchange signs of what they make of gradients, in place of the gradients.

[Note: local gradients] While `local` is true, gradients stay on the ranks that computed them. An optimizer then gives
its `exchange` what takes their place. A parameter without a gradient counts as one whose gradient is zero, and one that
has no variance yet has its gradient averaged as it is. Where optimizers have whole parameters, all ranks give the same
tensors in the same order. Where each has pieces of its own, the exchange adds gradients to the momenta itself: it alone
knows of the pieces of others.
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


Member = tuple[Group, Tensor, Tensor]
"""A group, one of its parameters, and a momentum of it."""


class MomentumExchange(Protocol):
    """Means over the ranks that train the same parameters; all of them call the same methods in the same order."""

    @property
    def owned(self) -> bool:
        """True if an optimizer has the pieces that its rank owns; else whole parameters."""

    def prepare(self, settled: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Give `others`, which have no variance that stays, their mean gradients; None where no rank has one."""

    def advance(self, members: Sequence[Member]) -> None:
        """Add local gradients to the momenta of what was settled in `prepare`; then take means of their signs."""

    def mean_gradients(self, settled: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The mean of gradients of what was settled in `prepare`, as their signs tell it; float32."""

    def over_pieces(self, params: Sequence[Tensor], rows: Tensor, *, largest: bool) -> Tensor:
        """Rows of numbers of these, summed over all pieces of each parameter, or the largest; float64."""

    def sign_mean(self, values: Mapping[Any, Tensor]) -> None:
        """Replace whole tensors by their mean as signs tell it; errors are kept by the key, a parameter or a name."""

    def exact_mean(self, values: Sequence[Tensor]) -> None:
        """Replace tensors by their mean."""

    def forget(self) -> None:
        """Begin anew with errors of zero."""


class OneBitOptimizer(DeviceOptimizer):
    """Base of the optimizers; `exchange` is given by an engine of several ranks, and is None on one."""

    exchange: MomentumExchange | None = None

    steps: int = 0
    """Taken so far."""

    freeze_step: int = 0
    """Steps after which the variance stays."""

    def _begin_as(
        self,
        params: Any,
        defaults: dict[str, Any],
        refused: Mapping[str, Any],
        backend: str,
        least: Mapping[str, tuple[float, int]],
    ) -> None:
        """`least`: whole numbers, and the least that each may be."""
        name = type(self).__name__
        for key, (count, least_count) in least.items():
            if not isinstance(count, (int, float)) or count % 1 or count < least_count:
                raise ValueError(f"{name}: {key} is {count!r}; expected a whole number of at least {least_count}")
        for key, value in refused.items():
            if value:
                raise RuntimeError(f"{name}: {key} is {value!r}, but it has no such variant; leave the argument out")
        if backend not in _BACKENDS:
            raise ValueError(f"{name}: comm_backend_name is {backend!r}; use one of {', '.join(_BACKENDS)}")
        self._set_up(params, defaults, None)

    @property
    def local(self) -> bool:
        """Whether the next gradients stay on their ranks: [Note: local gradients]."""
        return self.exchange is not None and self.steps >= self.freeze_step

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
        return int(state.get("step", 0)) >= self.freeze_step

    def _divided(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """(those of a group with a variance that stays, the others): the same on all ranks."""
        settled = [
            param
            for param in group["params"]
            if not group.get("non_freeze") and self._settled(self.state.get(param, {}))
        ]
        known = set(settled)
        return settled, [param for param in group["params"] if param not in known]

    def _divide(self) -> list[tuple[Group, list[Tensor], list[Tensor]]]:
        """The groups with what `_divided` says of them; those without a variance that stays have mean gradients."""
        divided = [(group, *self._divided(group)) for group in self.param_groups]
        if self.exchange is not None:
            settled = [param for _, found, _ in divided for param in found]
            self.exchange.prepare(settled, [param for _, _, others in divided for param in others])
        return divided

    def _warm_others(self, group: Group, others: list[Tensor]) -> None:
        """A step of parameters whose variance does not stay yet."""
        everything = group["params"]
        try:
            group["params"] = others
            self._warm(group)
        finally:
            group["params"] = everything

    def _advance_momenta(self, members: Sequence[Member]) -> None:
        """See `MomentumExchange.advance`; on a single rank momenta are what they are."""
        if self.exchange is not None:
            self.exchange.advance(members)
            return
        for group, param, momentum in members:
            momentum.lerp_(gradient_of(param), 1 - group["betas"][0])

    def unit_of(self, group: Mapping[str, Any]) -> float:
        """What momenta of a group are multiplied by in an exchange: errors are kept in these units."""
        return 1.0

    def counts(self) -> list[int]:
        """How far the optimizer is; ranks that own nothing take the numbers of others after a load."""
        return [self.steps]

    def resume(self, counts: Sequence[int]) -> None:
        """Go on from what `counts` gave."""
        self.steps = counts[0]

    def _exchanged(self, values: Mapping[Any, Tensor]) -> None:
        """Means of signs of tensors of any shape, in place."""
        if self.exchange is not None and values:
            self.exchange.sign_mean(values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `MomentKeeper`; errors of an exchange begin anew, until a checkpoint brings those of its rank."""
        super().load_state_dict(state_dict)
        self.steps = max((int(state.get("step", 0)) for state in self.state.values()), default=0)
        if self.exchange is not None:
            self.exchange.forget()


def gradient_of(param: Tensor) -> Tensor:
    """A parameter's gradient; zeros where there is none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def masked(group: Group, value: Tensor) -> Tensor:
    """Signs cannot say zero, so a group may have a mask of elements that stay zero (`exp_avg_mask`)."""
    mask = group.get("exp_avg_mask")
    return value if mask is None else value.mul_(mask.to(value.device, value.dtype).view(value.shape))
