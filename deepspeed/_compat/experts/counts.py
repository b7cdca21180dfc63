"""How many assignments each expert has, by the name that AutoEP publishes it under."""

from __future__ import annotations

from torch import Tensor

from deepspeed.moe.routing import count_of

__all__ = ["count_tokens_per_expert"]


def count_tokens_per_expert(selected_experts_indices: Tensor, num_experts: int) -> Tensor:
    """[num_experts], int64: how often each expert was chosen, of choices of any shape; the host does not wait."""
    return count_of(selected_experts_indices.reshape(-1).long(), num_experts)
