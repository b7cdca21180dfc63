"""Few tokens, each through some of many gated layers, as mixtures of experts decode: op `routed_experts`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.generate.packed import packed_linear_reference
from deepspeed.ops.generate.packed_weight import ExpertWeight
from deepspeed.ops.generate.streaming import MOST_ROWS
from deepspeed.ops.model.gated import gated_reference
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["choose_experts", "routable", "routed_experts"]

MOST_EXPERTS = 1024


def routed_experts(
    x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:
    """[tokens, width]: of each token, the sum over its `chosen` experts [tokens, k], times its `shares` [tokens, k].

    An expert computes (act(x · gateᵀ) · (x · upᵀ)) · downᵀ; gate_up is [experts, 2 · inner, width], and down is
    [experts, width, inner].
    """
    result: Tensor = op("routed_experts")(x, gate_up, down, chosen, shares, kind)
    return result


def routable(x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor) -> bool:
    """Whether the kernel takes it: few rows of 16 bits, whole experts whose rows begin at 16 bytes, no gradients."""
    return len(x) <= MOST_ROWS and _is_taken(x, gate_up, down, chosen)


def _is_taken(x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor) -> bool:
    """The same for any number of rows."""
    return (
        takes(x)
        and not torch.is_grad_enabled()
        and x.dim() == 2
        and len(x) > 0
        and x.dtype != torch.float32
        and chosen.shape[1] <= 16
        and _count(x, down) <= MOST_EXPERTS
        and all(each.shape[-1] % 16 == 0 for each in (gate_up, down))
        and all(
            each.dtype == x.dtype and each.stride(-1) == 1 and each.stride(1) % 8 == 0
            for each in (gate_up, down)
            if isinstance(each, Tensor)
        )
    )


def _count(x: Tensor, down: ExpertWeight) -> int:
    """How many experts there are."""
    return len(down) if isinstance(down, Tensor) else down.shape[0] // x.shape[1]


@reference("routed_experts")
def routed_experts_reference(
    x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:
    """Expert by expert; the host reads which are chosen."""
    experts = _count(x, down)
    total = torch.zeros(len(x), x.shape[1], dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _product(x[token], gate_up, expert, experts).chunk(2, -1)
        found = _product(gated_reference(gate, up, kind), down, expert, experts)
        total.index_add_(0, token, found.float() * shares[token, slot, None].float())
    return total.to(x.dtype)


def _product(x: Tensor, weight: ExpertWeight, expert: int, experts: int) -> Tensor:
    if isinstance(weight, Tensor):
        return functional.linear(x, weight[expert])
    rows = weight.shape[0] // experts
    return packed_linear_reference(x, weight.part(slice(expert * rows, (expert + 1) * rows)))


@by_triton("routed_experts")
def routed_experts_triton(
    x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:
    """By kernels where they take it: a weight is read once for all tokens, some at a time, that chose its expert."""
    if not _is_taken(x, gate_up, down, chosen):
        return routed_experts_reference(x, gate_up, down, chosen, shares, kind)
    from deepspeed.ops.generate.kernels.experts import route

    if len(x) <= MOST_ROWS:
        return route(x, gate_up, down, chosen, shares, kind)
    parts = zip(*(each.split(MOST_ROWS) for each in (x, chosen, shares)), strict=True)
    return torch.cat([route(rows, gate_up, down, experts, weights, kind) for rows, experts, weights in parts])


def choose_experts(logits: Tensor, count: int, *, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(shares, chosen), [tokens, count] each: the largest of the softmax of each row, in their order.

    `normalised`: shares of a token sum to 1.
    """
    result: tuple[Tensor, Tensor] = op("choose_experts")(logits, count, normalised, dtype)
    return result


@reference("choose_experts")
def choose_reference(logits: Tensor, count: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shares, chosen = logits.float().softmax(-1).topk(count, -1)
    shares = shares / shares.sum(-1, keepdim=True) if normalised else shares
    return shares.to(dtype), chosen


@by_triton("choose_experts")
def choose_triton(logits: Tensor, count: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By the kernel where it can; without gradients only."""
    few = logits.dim() == 2 and 0 < logits.shape[-1] <= MOST_EXPERTS and count <= min(16, logits.shape[-1])
    if not few or not takes(logits) or torch.is_grad_enabled() or not logits.is_contiguous() or not len(logits):
        return choose_reference(logits, count, normalised, dtype)
    from deepspeed.ops.generate.kernels.experts import choose

    return choose(logits, count, normalised, dtype)
