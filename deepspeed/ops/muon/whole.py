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

from deepspeed.ops.muon.momentum import Momenta, MomentumRule, directions_
from deepspeed.ops.muon.update import MuonRule, alike, heads_of, orthogonal_or_nan
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
    whole: Whole, group: dict[str, Any], momenta: Momenta, rule: MuonRule
) -> Iterator[tuple[int, Tensor]]:
    """(place, update) of every fragment, in any order, NaN where refused; see [Note: Muon over fragments]."""
    params = momenta.params
    heads = [heads_of(group, whole.parameter(param)) for param in params]
    directions = [torch.empty_like(param, dtype=wide(param.dtype), requires_grad=False) for param in params]
    if params:
        directions_(momenta, MomentumRule(rule.beta, rule.nesterov), directions)

    def compute(places: Sequence[int], wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        return _orthogonal_all(wholes, [heads[place] for place in places], rule)

    yield from whole.apply(group, params, directions, compute)


def _orthogonal_all(wholes: Sequence[Tensor], heads: Sequence[int | None], rule: MuonRule) -> Sequence[Tensor]:
    results: list[Tensor] = list(wholes)
    for places in alike([(whole.shape, whole.dtype, heads[at]) for at, whole in enumerate(wholes)], wholes):
        directions = torch.stack([wholes[place] for place in places])
        updates = orthogonal_or_nan(directions, rule, num_heads=heads[places[0]])
        for place, update in zip(places, updates.unbind(), strict=True):
            results[place] = update
    return results
