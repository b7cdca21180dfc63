"""Where tokens go: `Routes`, and the three rules that make them of a gate's logits.

An assignment is one choice of one token: S tokens with k choices each have k × S of them. Everything is done by
sorting these, never over tokens × experts × capacity, and the host never waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed import comm
from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Noise = Callable[[Tensor], Tensor]
"""Random numbers in the shape of a tensor [tokens, experts], on its device."""


@dataclass(frozen=True)
class Routes:
    """Where each assignment goes, [k, S] each; the first row has the first choices."""

    loss: Tensor  # the auxiliary loss that balances the experts, a scalar
    experts: Tensor  # the expert that the gate chose
    kept: Tensor  # False for what is dropped: the expert does not count
    weights: Tensor  # what the expert's output is multiplied by; 0 for what is dropped
    counts: Tensor  # [experts]: assignments of each before any was dropped
    capacity: int | None  # tokens that an expert takes; None: all
    place: Callable[[], Tensor]  # how `places` are found, which takes a sort that not everybody needs

    @cached_property
    def places(self) -> Tensor:
        """[k, S]: the place among the tokens of that expert; 0 for what is dropped."""
        return self.place()

    @property
    def num_experts(self) -> int:
        return self.counts.numel()


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
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
        random_scores = lottery(logits).gather(1, chosen.unsqueeze(1)).squeeze(1)
        if capacity is not None:
            kept = kept & _best(chosen, random_scores, kept, count, capacity)
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


def gumbel(logits: Tensor) -> Tensor:
    """Numbers of Gumbel's distribution: adding them to logits before argmax draws by softmax."""
    numbers = torch.finfo(torch.float32)
    uniform = torch.rand(logits.shape, device=logits.device) * (1 - numbers.eps - numbers.tiny) + numbers.tiny
    return -torch.log(-torch.log(uniform))


def random_scores(logits: Tensor) -> Tensor:
    """A random number for each token and expert: who has the highest ones stays."""
    return torch.rand(logits.shape, device=logits.device)


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum(rule, a, b)


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Top-1 gating: (auxiliary loss, combine weights [S, E, C], dispatch mask, expert counts).

    With `sparse_routes`, or `use_tutel`: (loss, capacity, E, experts [1, S], places, weights, counts), −1 where a token
    was dropped. `used_token` leaves out those that are 0 there.
    """
    tokens, experts = logits.shape
    capacity = top1_capacity(tokens, experts, capacity_factor, min_capacity) if drop_tokens else None
    noise = gumbel if noisy_gate_policy == "RSample" else None
    routes = route_top1(logits, capacity, used=used_token, noise=noise, lottery=random_scores if use_rts else None)
    return published(routes, ep_group, sparse=sparse_routes or use_tutel)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Top-2 gating; what it returns is as with `top1gating`."""
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, 2 * capacity_factor, min_capacity) if drop_tokens else None
    routes = route_top2(logits, capacity, noise=gumbel if top2_2nd_expert_sampling else None)
    return published(routes, ep_group, sparse=sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Top-k gating; an expert that has too many tokens keeps the best (`probs`) or the first (`position`)."""
    if drop_policy not in ("probs", "position"):
        raise UsageError(f"drop_policy is {drop_policy!r}; it must be 'probs' or 'position'")
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, k * capacity_factor, min_capacity) if drop_tokens else None
    routes = route_topk(logits, k, capacity, by_position=drop_policy == "position")
    return published(routes, ep_group, sparse=sparse_routes)


def top1_capacity(tokens: int, experts: int, factor: float, least: int) -> int:
    """The capacity of top-1 gating, which refuses batches that are smaller than the least capacity."""
    if tokens < least:
        raise UsageError(
            f"min_capacity is {least}, but there are only {tokens} tokens on this rank; give min_capacity at most "
            f"{tokens} (0 is allowed), or more tokens"
        )
    return capacity_of(tokens, experts, factor, least)


def published(routes: Routes, group: ProcessGroup | None, *, sparse: bool) -> tuple[Any, ...]:
    """Routes in the two forms that the gating functions return."""
    capacity = routes.capacity
    if capacity is None:
        capacity = common_capacity(routes, group)
    if sparse:
        experts = torch.where(routes.kept, routes.experts, -1).int()
        return (
            routes.loss,
            torch.tensor(capacity),
            routes.num_experts,
            experts,
            routes.places.int(),
            routes.weights,
            routes.counts,
        )
    tokens = routes.experts.shape[1]
    slots = functional.one_hot(routes.experts * capacity + routes.places, routes.num_experts * capacity)
    combine = (slots * routes.weights.unsqueeze(-1)).sum(0).view(tokens, routes.num_experts, capacity)
    return routes.loss, combine, combine.bool(), routes.counts


def common_capacity(routes: Routes, group: ProcessGroup | None) -> int:
    """The capacity with which no rank of the group drops a token; the host waits for it."""
    largest = routes.counts.max()
    if group is not None and comm.get_world_size(group) > 1:
        comm.all_reduce(largest, op=comm.ReduceOp.MAX, group=group)
    return int(largest)
