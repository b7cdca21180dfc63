"""`Whole`: how Muon updates fragments of matrices, of which each rank holds others.

[Note: Muon over fragments]
Where an optimizer's parameters are 1-D fragments, momentum is elementwise and stays with them. The direction that it
gives must be made orthogonal as a whole matrix, so every matrix is put together on one of the ranks that hold a part of
it, computed there, and its parts go back: the work is divided over the ranks and nothing is computed twice. A gradient
that is not finite must leave the momentum of the whole matrix alone, also on ranks whose part is finite. They learn it
without another exchange: the rank that sees the whole direction answers with NaN, which an orthogonal matrix never has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.ops.muon.update import MuonRule, alike, heads_of, orthogonal
from deepspeed.ops.optimizer import wide

__all__ = ["MatrixRule", "Whole", "fragment_updates"]

MatrixRule = Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]]
"""(places, whole tensors) → results of the same shapes."""


class Whole(Protocol):
    """Lends whole tensors to an optimizer whose parameters are fragments of them."""

    def parameter(self, param: Tensor) -> Tensor:
        """The parameter of the model of which the optimizer's `param` is a fragment."""

    def apply(
        self, group: dict[str, Any], params: Sequence[Tensor], fragments: Sequence[Tensor], rule: MatrixRule
    ) -> Iterator[tuple[int, Tensor]]:
        """`rule` of the whole tensors of which `fragments` are parts, as (place, this rank's part of the result).

        `params[place]` is the optimizer's parameter, whose interval of the whole `fragments[place]` covers. Every whole
        tensor is given to `rule` on one rank, which holds a part of it, under the place that it has there. All ranks
        call this for the same group (the optimizer's own dict) at the same time, also those that hold nothing.
        """


def fragment_updates(
    whole: Whole, group: dict[str, Any], params: Sequence[Tensor], momenta: Sequence[Tensor], rule: MuonRule
) -> Iterator[tuple[int, Tensor]]:
    """(place, update) of every fragment, in any order; see [Note: Muon over fragments]."""
    heads = [heads_of(group, whole.parameter(param)) for param in params]
    directions = [_direction(_grad(param), momentum, rule) for param, momentum in zip(params, momenta, strict=True)]

    def compute(places: Sequence[int], wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        return _orthogonal_all(wholes, [heads[place] for place in places], rule)

    for place, update in whole.apply(group, params, directions, compute):
        grad, momentum = _grad(params[place]), momenta[place]
        refused = update.isnan()
        old = momentum.to(update.dtype)
        momentum.copy_(torch.where(refused, old, _advanced(grad, old, rule)))
        yield place, torch.where(refused, grad.to(update.dtype), update).to(grad.dtype)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None, "only parameters with a gradient are updated"
    return param.grad


def _advanced(grad: Tensor, momentum: Tensor, rule: MuonRule) -> Tensor:
    return momentum.lerp(grad.to(momentum.dtype), 1 - rule.beta)


def _direction(grad: Tensor, momentum: Tensor, rule: MuonRule) -> Tensor:
    """What the momentum would point to, without advancing it."""
    dtype = wide(grad.dtype)
    advanced = _advanced(grad, momentum.to(dtype), rule)
    return grad.to(dtype).lerp(advanced, rule.beta) if rule.nesterov else advanced


def _orthogonal_all(wholes: Sequence[Tensor], heads: Sequence[int | None], rule: MuonRule) -> Sequence[Tensor]:
    results: list[Tensor] = list(wholes)
    for places in alike([(whole.shape, whole.dtype, heads[at]) for at, whole in enumerate(wholes)], wholes):
        directions = torch.stack([wholes[place] for place in places])
        finite = torch.isfinite(directions).flatten(1).all(1)
        updates = orthogonal(directions, rule, num_heads=heads[places[0]])
        updates.masked_fill_(~finite.view(-1, *(1 for _ in directions.shape[1:])), float("nan"))
        for place, update in zip(places, updates.unbind(), strict=True):
            results[place] = update
    return results
