"""Few tokens, each through some of many gated layers, as mixtures of experts decode: op `routed_experts`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.generate.streaming import MOST_ROWS
from deepspeed.ops.model.gated import gated_reference
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["routable", "routed_experts"]

MOST_EXPERTS = 1024


def routed_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor, kind: str) -> Tensor:
    """[tokens, width]: of each token, the sum over its `chosen` experts [tokens, k], times its `shares` [tokens, k].

    An expert computes (act(x · gateᵀ) · (x · upᵀ)) · downᵀ; gate_up is [experts, 2 · inner, width], and down is
    [experts, width, inner].
    """
    result: Tensor = op("routed_experts")(x, gate_up, down, chosen, shares, kind)
    return result


def routable(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> bool:
    """Whether the kernel takes it: few rows of 16 bits, whole experts whose rows begin at 16 bytes, no gradients."""
    return (
        takes(x)
        and not torch.is_grad_enabled()
        and x.dim() == 2
        and 0 < len(x) <= MOST_ROWS
        and chosen.shape[1] <= 16
        and len(gate_up) <= MOST_EXPERTS
        and all(
            each.dtype == x.dtype != torch.float32
            and each.stride(-1) == 1
            and each.stride(1) % 8 == 0
            and each.shape[-1] % 16 == 0
            for each in (gate_up, down)
        )
    )


@reference("routed_experts")
def routed_experts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:
    """Expert by expert; the host reads which are chosen."""
    total = torch.zeros(len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, -1)
        found = functional.linear(gated_reference(gate, up, kind), down[expert])
        total.index_add_(0, token, found.float() * shares[token, slot, None].float())
    return total.to(x.dtype)


@by_triton("routed_experts")
def routed_experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor, kind: str
) -> Tensor:
    """By kernels where they take it: a weight is read once for all tokens that chose its expert."""
    if not routable(x, gate_up, down, chosen):
        return routed_experts_reference(x, gate_up, down, chosen, shares, kind)
    from deepspeed.ops.generate.kernels.experts import route

    return route(x, gate_up, down, chosen, shares, kind)
