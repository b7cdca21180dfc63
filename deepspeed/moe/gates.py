"""The gates as functions: logits to the auxiliary loss, combine weights and a dispatch mask, or to sparse routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.moe.routing import Routes, capacity_of, route_top1, route_top2, route_topk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "einsum",
    "gumbel",
    "gumbel_rsample",
    "lots",
    "multiplicative_jitter",
    "top1_capacity",
    "top1gating",
    "top2gating",
    "topkgating",
]


def gumbel_rsample(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers of Gumbel's distribution: adding them to logits before argmax draws by softmax."""
    numbers = torch.finfo(torch.float32)
    uniform = torch.rand(shape, device=device) * (1 - numbers.eps - numbers.tiny) + numbers.tiny
    return -torch.log(-torch.log(uniform))


def gumbel(logits: Tensor) -> Tensor:
    """`gumbel_rsample` for logits."""
    return gumbel_rsample(tuple(logits.shape), logits.device)


def lots(logits: Tensor) -> Tensor:
    """A random number for each token and expert: who has the highest ones stays."""
    return torch.rand(logits.shape, device=logits.device)


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """The input times random factors of 1 − ε to 1 + ε."""
    if epsilon == 0:
        return x
    low, high = 1.0 - epsilon, 1.0 + epsilon
    return x * (torch.rand(x.shape, device=device) * (high - low) + low)


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """torch.einsum of two tensors."""
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
    routes = route_top1(logits, capacity, used=used_token, noise=noise, lottery=lots if use_rts else None)
    return _published(routes, ep_group, sparse=sparse_routes or use_tutel)


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
    return _published(routes, ep_group, sparse=sparse_routes)


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
    return _published(routes, ep_group, sparse=sparse_routes)


def top1_capacity(tokens: int, experts: int, factor: float, least: int) -> int:
    """The capacity of top-1 gating, which refuses batches that are smaller than the least capacity."""
    if tokens < least:
        raise UsageError(
            f"min_capacity is {least}, but there are only {tokens} tokens on this rank; give min_capacity at most "
            f"{tokens} (0 is allowed), or more tokens"
        )
    return capacity_of(tokens, experts, factor, least)


def _published(routes: Routes, group: ProcessGroup | None, *, sparse: bool) -> tuple[Any, ...]:
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
