"""What attention modules compute that call no function of Transformers, by family, with attention left to a function.

Each forward projects, turns and shapes as the family's own does; so that they fit where layers are split, too, widths
and heads are those that a module tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.sequence.key_bias import KeyBias
from deepspeed.sequence.whole import Whole

__all__ = ["FAMILIES", "Attention", "Family"]

Attention = Callable[..., tuple[Tensor, Any]]
"""Called as Transformers' attention functions are, with a `key_bias` besides."""


def _no_bias(_whole: Whole, _heads: int, like: Tensor) -> Tensor:
    return like


@dataclass(frozen=True)
class Family:
    """Attention modules of one kind of model."""

    modules: tuple[str, ...]
    """Their classes."""
    forward: Callable[[Attention], Callable[..., Any]]
    bias: str = ""
    """The argument by which a module gets biases by distance, if it does."""
    make: Callable[[Whole, int, Tensor], Tensor] = _no_bias
    """That argument for a whole sequence and so many heads, in the place of one that is like it."""


def _bloom(attention: Attention) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        query, key, value = (each.transpose(1, 2) for each in fused.unbind(3))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = KeyBias(alibi.unflatten(0, (-1, self.num_heads))[:, :, 0], 1 / self.inv_norm_factor)
        found, _weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            key_bias=bias,
        )
        mixed = self.dense(found.flatten(2))
        return residual + functional.dropout(mixed, self.hidden_dropout, self.training), None

    return forward


def _falcon(attention: Attention) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (each.transpose(1, 2) for each in _falcon_heads(self, self.query_key_value(hidden_states)))
        bias, dropout = None, 0.0  # with rotations it drops nothing
        if alibi is None:
            from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
        else:
            bias = KeyBias(alibi.reshape(-1, self.num_heads, alibi.shape[-1]))
            dropout = self.attention_dropout.p if self.training else 0.0
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "key_bias": bias}
        found, _weights = attention(self, query, key, value, attention_mask, **options)
        return self.dense(found.flatten(2)), None

    return forward


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [batch, length, heads, width]; keys may have fewer heads."""
    if module.new_decoder_architecture:  # groups: their queries, a key, a value
        groups = fused.unflatten(-1, (-1, module.num_heads // module.num_kv_heads + 2, module.head_dim))
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    if module.multi_query:  # all queries, one key, one value
        heads = fused.unflatten(-1, (module.num_heads + 2, module.head_dim))
        return heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
    triples = fused.unflatten(-1, (module.num_heads, 3, module.head_dim))
    return triples[..., 0, :], triples[..., 1, :], triples[..., 2, :]


def _bloom_alibi(whole: Whole, heads: int, like: Tensor) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    made: Tensor = build_alibi_tensor(_present(whole, like), heads, like.dtype)
    return made


def _falcon_alibi(whole: Whole, heads: int, like: Tensor) -> Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    made: Tensor = build_alibi_tensor(_present(whole, like), heads, like.dtype)
    return made


def _present(whole: Whole, like: Tensor) -> Tensor:
    """[batch or 1, length], 1 for tokens and 0 for padding."""
    if whole.present is None:
        return torch.ones(1, whole.length, dtype=torch.long, device=like.device)
    return whole.present.long()


FAMILIES = {
    "bloom": Family(("BloomAttention",), _bloom, "alibi", _bloom_alibi),
    "falcon": Family(("FalconAttention", "FalconFlashAttention2"), _falcon, "alibi", _falcon_alibi),
}
"""By `model_type`."""
