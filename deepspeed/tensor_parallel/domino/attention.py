"""Attention of which a rank computes some heads, in Megatron's layout: [sequence, batch, hidden]."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.parallel.mpu import tensor_group
from deepspeed.parallel.regions import Members
from deepspeed.tensor_parallel.domino.async_linear import (
    DominoAsyncColumnParallelLinear,
    Handle,
    RowParallelLinearNoComm,
)
from deepspeed.tensor_parallel.domino.settings import Settings
from deepspeed.tensor_parallel.draws import Draws, numbers_of_its_own

__all__ = ["AttnMaskType", "AttnType", "CoreAttention", "DominoModule", "ShardedAttention"]

Rotate = Callable[[Tensor, Tensor], Tensor]


class AttnType(Enum):
    """Whose keys are looked at."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """What a token must not see besides what the mask says."""

    padding = 1
    causal = 2


class DominoModule(nn.Module):
    """What all modules of Domino are."""


class CoreAttention(DominoModule):
    """Attention over the heads of a rank; a mask is True where nothing is to be seen."""

    def __init__(self, config: Any, tp_world_size: int, attn_mask_type: AttnMaskType = AttnMaskType.causal) -> None:
        super().__init__()
        settings = Settings.of(config)
        settings.share(tp_world_size)
        self.causal, self.dropout = attn_mask_type is AttnMaskType.causal, settings.drop_scores

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """[queries, batch, heads, dim], keys and values alike → [queries, batch, heads × dim]."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query_layer, key_layer, value_layer))
        bias = None if attention_mask is None else self._bias(attention_mask, query, key)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            bias,
            self.dropout if self.training else 0.0,
            is_causal=self.causal and bias is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _bias(self, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What is added to scores; a token that may see nothing sees everything alike, and is no NaN."""
        hidden = hidden.bool()
        if self.causal:
            future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            hidden = hidden | future.triu(1 + key.shape[2] - query.shape[2])
        zeros = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        return zeros.masked_fill(hidden, torch.finfo(query.dtype).min)


class ShardedAttention(DominoModule):
    """Projections around attention; what it returns is a summand of the output."""

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
        layer_number: int,
        attention_type: AttnType = AttnType.self_attn,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
    ) -> None:
        super().__init__()
        if attention_type is not AttnType.self_attn:
            raise UsageError(f"Domino: attention_type is {attention_type}; there is self-attention only")
        settings, group = Settings.of(config), tensor_group(mpu)
        peers = Members(group)
        queries, keys, _ = settings.share(peers.size)
        self.layer_number, self.apply_rotary_pos_emb = layer_number, apply_rotary_pos_emb
        self.groups, self.dim = keys, settings.head_dim
        outputs, inputs = (queries + 2 * keys) * settings.head_dim, queries * settings.head_dim
        self.query_key_value = DominoAsyncColumnParallelLinear(
            settings.hidden, outputs, group, config, config.init_method, settings.bias
        )
        self.core_attention = CoreAttention(config, peers.size, attn_mask_type)
        with numbers_of_its_own(peers):
            self.dense = RowParallelLinearNoComm(
                inputs, settings.hidden, config, config.output_layer_init_method, settings.bias, skip_bias_add=True
            )
        self.handles: dict[int, Handle] = {}
        """By micro-batch, from the norm in front to the first projection."""
        self._draws = Draws(peers) if settings.drop_scores > 0 and peers.size > 1 else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        micro_batch_num: int,
        rotary_pos_emb: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] → this rank's summand of it, and the bias of the sum."""
        mixed, _ = self.query_key_value(hidden_states, self.handles, micro_batch_num)
        return self.dense(self.domino_core_attention_forward(mixed, attention_mask, rotary_pos_emb))  # type: ignore[no-any-return]

    def domino_core_attention_forward(
        self, mixed_x_layer: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        """Projected queries, keys and values → what this rank's heads saw, [sequence, batch, heads × dim].

        Each key-value head has its queries, its key and its value side by side, as Megatron has them.
        """
        grouped = mixed_x_layer.unflatten(-1, (self.groups, -1))
        query, key, value = grouped.split([grouped.shape[-1] - 2 * self.dim, self.dim, self.dim], -1)
        query = query.unflatten(-1, (-1, self.dim)).flatten(2, 3)
        if rotary_pos_emb is not None:
            if self.apply_rotary_pos_emb is None:
                raise UsageError("Domino: rotary_pos_emb is given, but the layer has no apply_rotary_pos_emb")
            turns = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, key = self.apply_rotary_pos_emb(query, turns[0]), self.apply_rotary_pos_emb(key, turns[1])
        if self._draws is None:
            return self.core_attention(query, key, value, attention_mask)  # type: ignore[no-any-return]
        self._draws.begin(self)
        try:
            return self.core_attention(query, key, value, attention_mask)  # type: ignore[no-any-return]
        finally:
            self._draws.end()
