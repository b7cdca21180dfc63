"""The exact bytes of model states that one rank holds, from sizes alone: no processes, no tensors.

           parameters       gradients   masters     optimizer states
stage 0    whole            whole       whole       whole
stage 1    whole, padded    whole       shard       fragments
stage 2    whole, padded    fragments   shard       fragments
stage 3    shard            fragments   fragments   fragments

A shard has the padding of its layout (`deepspeed.fragments`: a `Block` of every optimizer group at stages 1 and 2,
`Striped` at stage 3) and is of one size on all ranks. Fragments have no padding, so they differ between ranks; rank 0
has the most (unless `gap` leaves holes). On one rank every stage is stage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from deepspeed.errors import UsageError
from deepspeed.fragments import Block, FlatLayout, Striped

__all__ = ["ModelStates", "Spread", "Widths", "fragments", "model_states"]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one element, by role; the defaults are those of 16-bit training with Adam."""

    param: int = 2
    grad: int = 4
    master: int = 4
    """0 where the optimizer updates the parameters themselves."""
    optimizer: float = 8
    """All states of the optimizer together: two fp32 moments take 8."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How states lie on the ranks, and the rank that is asked about."""

    stage: int
    world: int
    rank: int = 0
    gap: int = 1
    """At stages 1 and 2, a parameter begins at a multiple of so many elements (`parameter_alignment`)."""
    persistent: int = 0
    """At stage 3, parameters of up to so many elements are kept whole, padded, beside their shard."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"stage is {self.stage}; it must be 0, 1, 2 or 3")
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank is {self.rank} of {self.world} ranks; it must be from 0 to {self.world - 1}")


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes that one rank holds, padding included."""

    params: int
    grads: int
    masters: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.params + self.grads + self.masters + self.optimizer


def model_states(
    groups: Sequence[Sequence[int]], spread: Spread, *, widths: Widths = Widths(), frozen: Sequence[int] = ()
) -> ModelStates:
    """What a rank holds of parameters with these numbers of elements.

    `groups` are the trained parameters of every optimizer group, in the group's order; `frozen` are the others, which
    have no gradient, master or optimizer state. Parameters of another dtype are a group of their own.
    """
    whole = sum(chain.from_iterable(groups))
    params, grads, masters, states = whole + sum(frozen), whole, whole, whole
    if spread.stage > 0 and spread.world > 1:
        layouts = [_layout(tuple(group), spread) for group in groups]
        states = sum(_held(layout, spread.rank) for layout in layouts)
        grads = whole if spread.stage == 1 else states
        if spread.stage == 3:
            everything = (*chain.from_iterable(groups), *frozen)
            params = Striped(everything, spread.world).shard_numel
            lasting = tuple(numel for numel in everything if numel <= spread.persistent)
            params += Striped(lasting, spread.world).shard_numel * spread.world
            masters = states
        else:
            masters = sum(layout.shard_numel for layout in layouts)
            params = masters * spread.world + sum(frozen)
    moments = math.ceil(states * widths.optimizer)
    return ModelStates(params * widths.param, grads * widths.grad, masters * widths.master, moments)


def _layout(numels: tuple[int, ...], spread: Spread) -> FlatLayout:
    return Striped(numels, spread.world) if spread.stage == 3 else Block(numels, spread.world, gap=spread.gap)


def fragments(group: Sequence[int], spread: Spread) -> list[int]:
    """Elements that a rank updates of each parameter of an optimizer group."""
    if spread.stage == 0 or spread.world == 1:
        return list(group)
    return _intervals(_layout(tuple(group), spread), spread.rank)


def _held(layout: FlatLayout, rank: int) -> int:
    """Elements of the rank's fragments."""
    return sum(_intervals(layout, rank))


def _intervals(layout: FlatLayout, rank: int) -> list[int]:
    intervals = (layout.interval(param, rank) for param in range(len(layout.numels)))
    return [stop - start for start, stop in intervals]
