"""Where tokens go: `Routes`, and the three rules that make them of a gate's logits.

An assignment is one choice of one token: S tokens with k choices each have k × S of them. Everything is done by
sorting these, never over tokens × experts × capacity, and the host never waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["Routes", "capacity_of", "count_of", "places_within", "route_top1", "route_top2", "route_topk"]

Noise = Callable[[Tensor], Tensor]
"""Random numbers in the shape of a tensor [tokens, experts], on its device."""


@dataclass(frozen=True)
class Routes:
    """Where each assignment goes, [k, S] each; the first row has the first choices."""

    loss: Tensor
    """The auxiliary loss that balances the experts, a scalar."""
    experts: Tensor
    """The expert that the gate chose."""
    kept: Tensor
    """False for what is dropped: the expert does not count."""
    weights: Tensor
    """What the expert's output is multiplied by; 0 for what is dropped."""
    counts: Tensor
    """[experts]: assignments of each before any was dropped."""
    capacity: int | None
    """Tokens that an expert takes; None: all."""
    place: Callable[[], Tensor]
    """How `places` are found, which takes a sort that not everybody needs."""

    @cached_property
    def places(self) -> Tensor:
        """[k, S]: the place among the tokens of that expert; 0 for what is dropped."""
        return self.place()

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self.counts.numel()


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
    """How many tokens an expert takes."""
    return max(math.ceil(tokens / experts * factor), least)


def places_within(experts: Tensor, count: int) -> Tensor:
    """The place of each assignment among those of the same expert, in the order in which they come.

    [2, 0, 2, 2, 0] → [0, 0, 1, 2, 1]. `count` is the number of experts.
    """
    order = torch.argsort(experts, stable=True)
    sorted_experts = experts[order]
    sizes = count_of(experts, count)
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(experts)
    places[order] = torch.arange(experts.numel(), device=experts.device) - starts[sorted_experts]
    return places


def count_of(experts: Tensor, count: int, used: Tensor | None = None) -> Tensor:
    """[count]: how many assignments each expert has; torch.bincount would wait for the device."""
    ones = torch.ones_like(experts) if used is None else used.to(experts.dtype)
    return torch.zeros(count, dtype=experts.dtype, device=experts.device).scatter_add_(0, experts, ones)


def route_top1(
    logits: Tensor,
    capacity: int | None,
    *,
    used: Tensor | None = None,
    noise: Noise | None = None,
    lottery: Noise | None = None,
) -> Routes:
    """Each token to its best expert; `noise` changes which, `lottery` draws those that an expert keeps."""
    count = logits.shape[1]
    gates = torch.softmax(logits, dim=1)
    chosen = torch.argmax(logits if noise is None else logits + noise(logits), dim=1)
    counts = count_of(chosen, count, used)
    loss = torch.sum(_shares(gates, counts)) * count
    kept = torch.ones_like(chosen, dtype=torch.bool) if used is None else used.bool()
    if lottery is not None:  # drawn even where nothing is dropped, as a resumed run must draw the same
        lots = lottery(logits).gather(1, chosen.unsqueeze(1)).squeeze(1)
        if capacity is not None:
            kept = kept & _best(chosen, lots, kept, count, capacity)
    elif capacity is not None:
        kept = kept & (_places_of_kept(chosen, kept, count) < capacity)
    weights = gates.gather(1, chosen.unsqueeze(1)).squeeze(1)
    if capacity is not None or used is not None:
        weights = weights * kept
    place = partial(_places_of_kept, chosen, kept, count)
    return Routes(loss, chosen[None], kept[None], weights[None], counts, capacity, lambda: place()[None])


def route_top2(logits: Tensor, capacity: int | None, *, noise: Noise | None = None) -> Routes:
    """Each token to its best expert and, by noise if there is any, to a second; first choices come first."""
    count = logits.shape[1]
    gates = torch.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    others = logits if noise is None else logits + noise(logits)
    second = torch.argmax(others.scatter(1, first.unsqueeze(1), float("-inf")), dim=1)
    chosen = torch.stack((first, second))
    loss = torch.mean(_shares(gates, count_of(first, count))) * count * count
    weights, counts = gates.gather(1, chosen.t()).t(), count_of(chosen.view(-1), count)
    if capacity is None:
        kept = torch.ones_like(chosen, dtype=torch.bool)
        place = partial(places_within, chosen.view(-1), count)
        return Routes(loss, chosen, kept, _normalised(weights), counts, capacity, lambda: place().view_as(chosen))
    places = places_within(chosen.view(-1), count).view_as(chosen)
    kept = places < capacity
    return Routes(loss, chosen, kept, _normalised(weights * kept), counts, capacity, lambda: places * kept)


def route_topk(logits: Tensor, k: int, capacity: int | None, *, by_position: bool = False) -> Routes:
    """Each token to its k best experts; an expert keeps the most probable ones, or those that come first."""
    tokens, count = logits.shape
    if not 1 <= k <= count:
        raise UsageError(f"k is {k}, but a token can go to 1 to {count} of the {count} experts; choose k in that range")
    indices = torch.topk(logits, k, dim=1).indices
    gates = torch.softmax(logits, dim=1)
    scores = gates.gather(1, indices)
    flat = indices.view(-1)  # token by token
    counts = count_of(flat, count)
    loss = torch.mean(_shares(gates, counts)) * count * count / k
    kept = torch.ones_like(flat, dtype=torch.bool)
    if capacity is not None:
        if by_position:
            kept = places_within(flat, count) < capacity
        else:
            kept = _best(flat, scores.detach().reshape(-1), kept, count, capacity)
    place = partial(_places_of_kept, flat, kept, count)
    chosen, kept = (each.view(tokens, k).t() for each in (flat, kept))
    weights = scores.t() if capacity is None else scores.t() * kept
    return Routes(loss, chosen, kept, _normalised(weights), counts, capacity, lambda: place().view(tokens, k).t())


def _shares(gates: Tensor, counts: Tensor) -> Tensor:
    """[experts]: an expert's mean probability × its share of the tokens; all 0 of a rank that has no token."""
    tokens = len(gates)
    return gates.mean(0) * (counts / tokens) if tokens else gates.sum(0)


def _best(experts: Tensor, scores: Tensor, among: Tensor, count: int, capacity: int) -> Tensor:
    """True for the `capacity` assignments of each expert that score highest; only those of `among` compete."""
    ranked = torch.argsort(scores, descending=True, stable=True)
    kept = torch.empty_like(among)
    kept[ranked] = _places_of_kept(experts[ranked], among[ranked], count) < capacity
    return kept


def _places_of_kept(experts: Tensor, kept: Tensor, count: int) -> Tensor:
    """As `places_within` for those that are kept; 0 for the others."""
    return places_within(torch.where(kept, experts, count), count + 1) * kept


def _normalised(weights: Tensor) -> Tensor:
    """[k, S]: the weights of each token made to sum to 1; all 0 where all of them were dropped."""
    return weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
