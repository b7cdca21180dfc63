"""Tokens that are dropped at random around a layer: sampled, gathered, and put back, as operations of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "GatherTokens",
    "ScatterTokens",
    "bert_sample_tokens",
    "gpt_sample_tokens",
    "mask_gather_bert",
    "mask_gather_gpt",
    "token_gather",
    "token_scatter_",
    "token_sort_",
]


def _sampled(
    kept: int, length: int, batch: int, layers: int, device: Any, generator: torch.Generator | None = None
) -> Tensor:
    """Positions [layers, batch, kept] in ascending order, each row without repeats."""
    draws = torch.rand(layers, batch, length, generator=generator, device=None if generator else device)
    return draws.topk(kept, dim=-1).indices.sort(dim=-1).values.to(device=device, dtype=torch.int32)


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: Any = "cpu",
    attn_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The positions [layers, batch, kept] that layers of a causal model keep, and the leading corner of its mask."""
    kept = _sampled(reserved_length, seq_length, batch_size, layers, device, generator)
    return kept, None if attn_mask is None else mask_gather_gpt(attn_mask, reserved_length)


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: Any = "cpu",
    attn_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The positions that layers of an encoder keep, and its mask for each of them: [layers, batch, 1, …, kept]."""
    if attn_mask is None:
        raise ValueError("bert_sample_tokens needs attn_mask: which tokens are padding must follow the kept ones")
    kept = _sampled(reserved_length, seq_length, batch_size, layers, device, generator)
    return kept, mask_gather_bert(attn_mask, kept)


def token_sort_(sorted_indices: Tensor, seq_length: int) -> Tensor:
    """Sort positions below `seq_length` along the last dim, in place."""
    return sorted_indices.copy_(sorted_indices.sort(dim=-1).values)


def _along(activations: Tensor, sorted_indices: Tensor, batch_first: bool) -> tuple[int, Tensor]:
    index = sorted_indices.long() if batch_first else sorted_indices.long().t()
    index = index.reshape(*index.shape, *[1] * (activations.dim() - 2)).expand(-1, -1, *activations.shape[2:])
    return (1 if batch_first else 0), index


def token_gather(activations: Tensor, sorted_indices: Tensor, batch_first: bool = True) -> Tensor:
    """The tokens at positions [batch, kept] of [batch, length, …], or of [length, batch, …]."""
    return activations.gather(*_along(activations, sorted_indices, batch_first))


def token_scatter_(
    all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool = True
) -> Tensor:
    """Put tokens back at their positions, in place."""
    return all_activations.scatter_(*_along(all_activations, sorted_indices, batch_first), layer_activations)


def mask_gather_gpt(attn_mask: Tensor, truncated_seq_len: int) -> Tensor:
    """The leading corner of a causal mask."""
    return attn_mask[..., :truncated_seq_len, :truncated_seq_len]


def mask_gather_bert(attn_mask: Tensor, sorted_indices: Tensor) -> Tensor:
    """The mask [batch, 1, 1 or length, length] at positions [layers, batch, kept], for each layer."""
    found = []
    for index in sorted_indices.long():
        columns = index[:, None, None, :].expand(-1, attn_mask.shape[1], attn_mask.shape[2], -1)
        mask = attn_mask.expand(len(index), *attn_mask.shape[1:]).gather(3, columns)
        if mask.shape[2] > 1:
            mask = mask.gather(2, index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        found.append(mask)
    return torch.stack(found)


class GatherTokens:
    """The kept tokens of activations, with gradients."""

    @staticmethod
    def apply(activations: Tensor, sorted_indices: Tensor, batch_first: bool = True) -> tuple[Tensor, Tensor]:
        """(the activations, their kept tokens)."""
        return activations, token_gather(activations, sorted_indices, batch_first)


class ScatterTokens:
    """Activations whose kept tokens are those of a layer, with gradients."""

    @staticmethod
    def apply(
        all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool = True
    ) -> Tensor:
        """A new tensor; what was given stays."""
        dim, index = _along(all_activations, sorted_indices, batch_first)
        return all_activations.scatter(dim, index, layer_activations.to(all_activations.dtype))
