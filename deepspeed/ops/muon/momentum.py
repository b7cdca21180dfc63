"""Muon's momentum over lists of tensors: ops `muon_direction` and `muon_apply`, each one pass over memory.

direction = β·m' + (1−β)·g with m' = β·m + (1−β)·g (Nesterov; else m')
p ← keep·p − lr·update;  m ← m'                              once the direction was made orthogonal

A gradient that is not finite leaves the momentum of its matrix alone: its update then is NaN, which an orthogonal
matrix never has, and the gradient itself takes its place. That is why the momentum is advanced by the second pass. One
in 8 bits (`blockwise`) is rounded there, once a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deepspeed.ops import blockwise
from deepspeed.ops.model.linear import takes
from deepspeed.ops.moments import wide
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import contiguous
from deepspeed.ops.precompile import is_placeholder
from deepspeed.ops.registry import by_triton, chosen, op, reference

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MomentumRule:
    """The numbers of one update."""

    beta: float
    nesterov: bool = True
    lr: float = 0.0
    keep: float = 1.0


@dataclass(slots=True)
class Momenta:
    """Parameters of a step: lists of one device; gradients are multiplied by `factor` and divided as conditions say."""

    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    outs: list[Tensor | None] = field(default_factory=list)
    """Where updated parameters are written as well; empty, or one for each parameter that has such a copy."""
    factor: float = 1.0
    conditions: Conditions | None = None
    scales: list[Tensor] = field(default_factory=list)
    """Of momenta that are 8-bit codes, one for each; empty for any other."""
    steps: list[int] = field(default_factory=list)
    """As long as the scales: by which codes are rounded."""

    def some(self, places: Sequence[int]) -> Momenta:
        """Those at some places."""

        def pick(values: list[T]) -> list[T]:
            return [values[place] for place in places] if values else []

        params, grads, momenta = pick(self.params), pick(self.grads), pick(self.momenta)
        outs, scales, steps = pick(self.outs), pick(self.scales), pick(self.steps)
        return Momenta(params, grads, momenta, outs, self.factor, self.conditions, scales, steps)

    @property
    def coded(self) -> tuple[list[Tensor], ...]:
        """The scales as kernels take them."""
        return (self.scales,) if self.scales else ()

    def gradient(self, place: int) -> Tensor:
        """The gradient in its true size, wide."""
        grad = self.grads[place].to(wide(self.params[place].dtype)) * self.factor
        return grad if self.conditions is None else grad / self.conditions.divisor

    def momentum(self, place: int) -> Tensor:
        """The momentum in its parameter's shape, wide."""
        held, param = self.momenta[place], self.params[place]
        values = blockwise.decode(held, self.scales[place], signed=True) if self.scales else held
        return values.view(param.shape).to(wide(param.dtype))

    def put(self, place: int, values: Tensor) -> None:
        """Make these the momentum, rounded once."""
        held = self.momenta[place]
        if not self.scales:
            held.copy_(values.view(held.shape))
            return
        noise = blockwise.dither(values.numel(), self.steps[place], signed=True, device=values.device)
        blockwise.encode(values.float(), held, self.scales[place], signed=True, dither=noise)

    def alike(self, *more: Sequence[Tensor]) -> Iterator[list[int]]:
        """Places whose tensors have one dtype in each list, and one number by which codes are rounded."""
        found: dict[Hashable, list[int]] = {}
        for place, param in enumerate(self.params):
            out = self.outs[place] if self.outs else None
            others = (self.grads[place], self.momenta[place], *(tensors[place] for tensors in more))
            key = (param.dtype, *(each.dtype for each in others), None if out is None else out.dtype)
            step = self.steps[place] if self.steps else 0
            found.setdefault((step, *key), []).append(place)
        yield from found.values()


def directions_(momenta: Momenta, rule: MomentumRule, into: Sequence[Tensor]) -> None:
    """Write where each momentum would point to, of as many elements as its gradient; nothing is advanced."""
    op("muon_direction")(momenta, rule, into)


def advance_(momenta: Momenta, rule: MomentumRule, updates: Sequence[Tensor]) -> None:
    """Update parameters by `updates`, of as many elements, and advance their momenta; NaN stands for a refused one."""
    op("muon_apply")(momenta, rule, updates)


def takes_one_pass(device: torch.device) -> bool:
    """True if there are kernels for parameters on such a device; ranks must agree, so that nothing else decides."""
    return (device.type == "cuda" or is_placeholder(device)) and "reference" not in (
        chosen("muon_direction"),
        chosen("muon_apply"),
    )


@reference("muon_direction")
@torch.no_grad()
def directions_reference(momenta: Momenta, rule: MomentumRule, into: Sequence[Tensor]) -> None:
    """Tensor by tensor."""
    for place, target in enumerate(into):
        grad = momenta.gradient(place)
        advanced = momenta.momentum(place).lerp(grad, 1 - rule.beta)
        target.view(grad.shape).copy_(grad.lerp(advanced, rule.beta) if rule.nesterov else advanced)


@reference("muon_apply")
@torch.no_grad()
def apply_reference(momenta: Momenta, rule: MomentumRule, updates: Sequence[Tensor]) -> None:
    """Tensor by tensor, rounded once."""
    if momenta.conditions is not None and bool(momenta.conditions.skip != 0):
        return
    for place, param in enumerate(momenta.params):
        grad = momenta.gradient(place)
        update = updates[place].view(param.shape).to(grad.dtype)
        refused = update.isnan()
        old = momenta.momentum(place)
        momenta.put(place, torch.where(refused, old, old.lerp(grad, 1 - rule.beta)))
        param.copy_(rule.keep * param.to(grad.dtype) - rule.lr * torch.where(refused, grad, update))
        out = momenta.outs[place] if momenta.outs else None
        if out is not None:
            out.copy_(param)


def _takes(momenta: Momenta, more: Sequence[Tensor]) -> bool:
    outs = [out for out in momenta.outs if out is not None]
    lists = [momenta.params, momenta.grads, momenta.momenta, list(more), outs]
    dense = contiguous(lists) and all(each.dtype != torch.float64 for tensors in lists for each in tensors)
    return dense and all(takes(param) for param in momenta.params[:1])  # not in host memory beside a GPU


@torch.no_grad()
@by_triton("muon_direction")
def directions_triton(momenta: Momenta, rule: MomentumRule, into: Sequence[Tensor]) -> None:
    """By the kernel."""
    from deepspeed.ops.kernels.many import Columns, Launch, launch

    if not _takes(momenta, into):
        directions_reference(momenta, rule, into)
        return
    numbers = (1 - rule.beta, 1 - rule.beta if rule.nesterov else 0.0)
    for places in momenta.alike(into):
        some = momenta.some(places)
        columns = Columns(
            some.params, some.grads, some.momenta, outs=[into[place] for place in places], scales=some.coded
        )
        launch(columns, Launch("muon_direction", numbers, some.factor, conditions=some.conditions))


@torch.no_grad()
@by_triton("muon_apply")
def apply_triton(momenta: Momenta, rule: MomentumRule, updates: Sequence[Tensor]) -> None:
    """By the kernel."""
    from deepspeed.ops.kernels.many import Columns, Launch, launch

    updates = [update if update.is_contiguous() else update.contiguous() for update in updates]
    if not _takes(momenta, updates):
        apply_reference(momenta, rule, updates)
        return
    for places in momenta.alike(updates):
        some = momenta.some(places)
        outs = [out for out in some.outs if out is not None]
        given = [updates[place] for place in places]
        columns = Columns(some.params, some.grads, some.momenta, given, outs, some.coded)
        numbers, step = (1 - rule.beta, rule.lr, rule.keep), some.steps[0] if some.steps else 0
        launch(columns, Launch("muon_apply", numbers, some.factor, step, some.conditions))
        increment_version([*some.params, *outs])
