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
"""Called as Transformers' attention functions are, with a `bias` of keys besides."""


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
            bias=bias,
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
        options = {"scaling": self.inv_norm_factor, "dropout": dropout, "bias": bias}
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


def _mpt(attention: Attention) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
        parts = (part.unflatten(-1, (self.n_heads, self.head_dim)) for part in fused.chunk(3, -1))
        query, key, value = (each.transpose(1, 2) for each in parts)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        found, _weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
            bias=KeyBias(position_bias[None, :, 0], 1 / self.softmax_scale),
        )
        return self.out_proj(found.flatten(2)), None

    return forward


def _gptj(attention: Attention) -> Callable[..., Any]:
    return _turned(attention, _gptj_heads)


def _codegen(attention: Attention) -> Callable[..., Any]:
    return _turned(attention, _codegen_heads)


def _turned(attention: Attention, project: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Attention with rotated neighbours among the elements of a head; `project` gives [batch, length, heads, width]."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        layer_past: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = project(self, hidden_states)
        tables = self.embed_positions.to(hidden_states.device)[position_ids]  # [batch or 1, length, sines and cosines]
        width = tables.shape[-1]
        # CodeGen's tables stay in float32, and so does what it turns
        query, key = (_turn(each, tables, width).to(value.dtype) for each in (query, key))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        found, _weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=1 / self.scale_attn,
            dropout=self.attn_dropout.p if self.training else 0.0,
            position_ids=position_ids,
        )
        return self.resid_dropout(self.out_proj(found.flatten(2))), None

    return forward


def _turn(heads: Tensor, tables: Tensor, width: int) -> Tensor:
    """Rotate pairs among the first elements of heads, as many as there are sines and cosines."""
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    turned = apply_rotary_pos_emb(heads[..., :width], *tables.chunk(2, -1))
    return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:].to(turned.dtype)], -1)


def _gptj_heads(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    shape = (module.num_attention_heads, module.head_dim)
    return tuple(layer(hidden).unflatten(-1, shape) for layer in (module.q_proj, module.k_proj, module.v_proj))


def _codegen_heads(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Four runs of heads, in each of them queries, then values, then keys."""
    runs = module.qkv_proj(hidden).unflatten(-1, (4, 3, -1, module.head_dim))
    query, value, key = (part.flatten(2, 3) for part in runs.unbind(-3))
    return query, key, value


def _bloom_alibi(whole: Whole, heads: int, like: Tensor) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    made: Tensor = build_alibi_tensor(_present(whole, like), heads, like.dtype)
    return made


def _falcon_alibi(whole: Whole, heads: int, like: Tensor) -> Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    made: Tensor = build_alibi_tensor(_present(whole, like), heads, like.dtype)
    return made


def _mpt_alibi(whole: Whole, heads: int, like: Tensor) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    made: Tensor = build_mpt_alibi_tensor(heads, whole.length, device=like.device)  # type: ignore[no-untyped-call]
    return made


def _present(whole: Whole, like: Tensor) -> Tensor:
    """[batch or 1, length], 1 for tokens and 0 for padding."""
    if whole.present is None:
        return torch.ones(1, whole.length, dtype=torch.long, device=like.device)
    return whole.present.long()


FAMILIES = {
    "bloom": Family(("BloomAttention",), _bloom, "alibi", _bloom_alibi),
    "falcon": Family(("FalconAttention", "FalconFlashAttention2"), _falcon, "alibi", _falcon_alibi),
    "gptj": Family(("GPTJAttention", "GPTJFlashAttention2"), _gptj),
    "codegen": Family(("CodeGenAttention",), _codegen),
    "mpt": Family(("MptAttention",), _mpt, "position_bias", _mpt_alibi),
}
"""By `model_type`."""
