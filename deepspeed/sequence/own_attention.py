"""Attention modules that compute by themselves instead of by Transformers' attention functions: Bloom's and Falcon's.

They get a forward that projects as theirs does and hands queries, keys and values on. Their biases by distance (ALiBi)
belong to keys of whole sequences, so that these are made anew, by the model's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.swap import put_forward
from deepspeed.sequence.key_bias import KeyBias
from deepspeed.sequence.whole import Whole

__all__ = ["Attention", "knows", "teach"]

Attention = Callable[..., tuple[Tensor, Any]]
"""Called as Transformers' attention functions are, with a `key_bias` besides."""
Find = Callable[[Tensor | None], Whole | None]
"""What a mask stands for."""

_FAMILIES = ("bloom", "falcon")


def knows(model: Any) -> bool:
    """Whether a model's attention modules can be taught."""
    return getattr(model.config, "model_type", None) in _FAMILIES


def teach(model: Any, attention: Attention, find: Find, stack: ExitStack) -> None:
    """Let the attention modules of a model use an attention function, until the stack is closed."""
    kind = model.config.model_type
    forward = {"bloom": _bloom, "falcon": _falcon}[kind](attention)
    biases = _Biases(kind, model.config.num_attention_heads, find)
    for module in model.modules():
        if type(module).__name__.startswith(("BloomAttention", "FalconAttention", "FalconFlashAttention")):
            stack.callback(put_forward(module, forward, compiled=forward))
            # before those who take some heads of it
            stack.callback(module.register_forward_pre_hook(biases, with_kwargs=True, prepend=True).remove)


class _Biases:
    """Biases by distance of the whole sequence, in the place of those that a model made of its part."""

    def __init__(self, kind: str, heads: int, find: Find) -> None:
        self._kind, self._heads, self._find = kind, heads, find
        self._made: WeakKeyDictionary[Whole, Tensor] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = self._find(kwargs.get("attention_mask"))
        alibi = kwargs.get("alibi")
        if whole is None or whole.length == 0 or alibi is None:
            return None
        made = self._made.get(whole)
        if made is None or made.dtype != alibi.dtype:
            made = self._made[whole] = self._make(whole, alibi)
        return args, {**kwargs, "alibi": made}

    def _make(self, whole: Whole, like: Tensor) -> Tensor:
        if self._kind == "bloom":
            from transformers.models.bloom.modeling_bloom import build_alibi_tensor
        else:
            from transformers.models.falcon.modeling_falcon import build_alibi_tensor
        present = whole.present
        if present is None:
            present = torch.ones(1, whole.length, device=like.device)
        made: Tensor = build_alibi_tensor(present.long(), self._heads, like.dtype)
        return made


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
