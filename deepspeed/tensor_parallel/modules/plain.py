"""Embeddings and norms that every rank computes whole, made of weights alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EmbeddingLayer", "Normalize", "OPTEmbedding", "RMSNormalize", "add_bias"]


def add_bias(input: Tensor, bias: Tensor | None) -> Tensor:
    """The sum in the memory of `input`, where there is a bias."""
    return input if bias is None else input.add_(bias)


def _param(value: Tensor | None, shape: Sequence[int] | int, dtype: torch.dtype) -> nn.Parameter:
    """The given values, or ones."""
    return nn.Parameter(torch.ones(shape, dtype=dtype) if value is None else value)


class EmbeddingLayer(nn.Module):
    """Rows of a weight, given or empty of a shape."""

    def __init__(
        self,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        given = torch.empty(tuple(weight_shape or ()), dtype=dtype) if weight is None else weight
        self.weight = nn.Parameter(given)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens → rows."""
        rows = F.embedding(input, self.weight)
        return rows if self.bias is None else rows + self.bias


class OPTEmbedding(EmbeddingLayer):
    """Positions counted from an attention mask; the first two rows of the weight stand for none."""

    offset = 2

    def __init__(
        self, weight_shape: Sequence[int] | None = None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__(weight_shape, weight=weight, bias=bias)

    def forward(self, attention_mask: Tensor, past_key_values_length: int = 0, position_ids: int = 0) -> Tensor:
        """A row for each token behind the past; the mask is 1 for tokens and 0 for padding."""
        mask = attention_mask.long()
        positions = (mask.cumsum(1) * mask - 1)[:, past_key_values_length:]
        return super().forward(positions + self.offset)


class Normalize(nn.Module):
    """A layer norm in the dtype of its input, computed in `dtype`."""

    def __init__(
        self,
        dim: int | None = None,
        dtype: torch.dtype = torch.float,
        eps: float = 1e-5,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = _param(weight, dim or 0, dtype)
        self.bias = nn.Parameter(torch.zeros_like(self.weight) if bias is None else bias)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """[…, dim] → […, dim]."""
        found = F.layer_norm(input.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)
        return found.to(input.dtype)


class RMSNormalize(nn.Module):
    """A norm by the root of the mean square, computed in float32."""

    def __init__(
        self,
        dim: int | None = None,
        dtype: torch.dtype = torch.float,
        eps: float = 1e-5,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = _param(weight, dim or 0, dtype)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[…, dim] → […, dim], in the dtype of the weight where that is a short one."""
        wide = hidden_states.float()
        found = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        short = self.weight.dtype in (torch.float16, torch.bfloat16)
        return (found.to(self.weight.dtype) if short else found) * self.weight
