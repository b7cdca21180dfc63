"""Sparse self-attention in models in the shape of BERT: the layer, and what a model and its inputs need for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig

__all__ = ["BertSparseSelfAttention", "SparseAttentionUtils"]

_LONGEST = 2048
"""Tokens that the layout is made for where a model's own limit is lower."""


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention over the blocks of a pattern; a FixedSparsityConfig where none is given.

    Weights of attention are not dropped out: no row of them is ever whole.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        if width % heads:
            raise UsageError(f"hidden_size is {width} and num_attention_heads {heads}, which must divide it")
        self.num_attention_heads = heads
        self.attention_head_size = width // heads
        self.all_head_size = width
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config or FixedSparsityConfig(num_heads=heads),
            max_seq_length=max(_LONGEST, getattr(config, "max_position_embeddings", 0)),
        )

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[batch, length, width] as [batch, heads, length, d]."""
        return x.view(*x.shape[:-1], -1, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attended values [batch, length, width].

        The mask is added to scores, or false where nothing may be attended to: of keys, [batch, length] or [batch, 1,
        1, length], or of pairs, [batch, 1, length, length].
        """
        query, key, value = (
            self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value)
        )
        pairs = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[2] > 1
        bias = _added(attention_mask, query.dtype) if pairs else None
        keys = None if pairs else attention_mask
        out: Tensor = self.sparse_self_attention(query, key, value, rpe=bias, key_padding_mask=keys)
        return out.transpose(1, 2).flatten(2)


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


class _OfTransformers(BertSparseSelfAttention):
    """The same, called and answering as Transformers' layers are."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        encoder_hidden_states: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """(attended values, no weights)."""
        if past_key_values is not None or encoder_hidden_states is not None:
            raise UsageError(
                "sparse self-attention has no cache and no other sequence; call the model with use_cache=False"
            )
        return super().forward(hidden_states, attention_mask), None


class SparseAttentionUtils:
    """What adapts a model of BERT or RoBERTa, its tokenizer and its inputs."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the learned positions until there are `max_position`; returns the model."""
        owner = next(
            (each for each in model.modules() if isinstance(getattr(each, "position_embeddings", None), nn.Embedding)),
            None,
        )
        if owner is None:
            raise UsageError(f"{type(model).__name__} has no module with position_embeddings, which are to be extended")
        table: nn.Embedding = owner.position_embeddings  # type: ignore[assignment]
        # RoBERTa counts positions from above the one of padding.
        reserved = 0 if table.padding_idx is None else table.padding_idx + 1
        known = table.weight.shape[0] - reserved
        if max_position <= known:
            raise UsageError(
                f"max_position is {max_position}, and the model has {known} positions already; expected more. A "
                "model that is sharded has to be extended before deepspeed.initialize"
            )
        with torch.no_grad():
            learned = table.weight[reserved:]
            rows = learned.repeat(-(-max_position // known), 1)[:max_position]
            table.weight = nn.Parameter(torch.cat([table.weight[:reserved], rows]), table.weight.requires_grad)
        total = table.num_embeddings = max_position + reserved
        for name, positions in (("position_ids", True), ("token_type_ids", False)):
            old = getattr(owner, name, None)
            if isinstance(old, Tensor):
                values = torch.arange(total, device=old.device) if positions else old.new_zeros(total)
                setattr(owner, name, values.expand(1, -1).to(old.dtype))
        model.config.max_position_embeddings = total  # type: ignore[union-attr]
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let a tokenizer cut at `max_position`, also after it was saved; returns it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Let every layer of a model's encoder attend by the pattern, with the weights that it has; returns it."""
        base = getattr(model, getattr(model, "base_model_prefix", ""), model)
        layers = getattr(getattr(base, "encoder", None), "layer", None)
        if layers is None:
            raise UsageError(
                f"{type(model).__name__} has no encoder.layer, as BERT and RoBERTa have; put SparseSelfAttention into "
                "its attention yourself"
            )
        model.config.max_position_embeddings = max(max_position, model.config.max_position_embeddings)
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            model.config, layers, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[Any]:
        """Replace `attention.self` of each layer; returns the layers."""
        for number, layer in enumerate(layers):
            old = layer.attention.self
            if getattr(config, "is_decoder", False) and not (sparsity_config is not None and sparsity_config.causal):
                raise UsageError(
                    "is_decoder is true in the model's config, and the pattern is bidirectional; give a "
                    "sparsity_config with attention 'unidirectional'"
                )
            if not all(isinstance(getattr(old, name, None), nn.Linear) for name in ("query", "key", "value")):
                raise UsageError(
                    f"attention.self of layer {number} is a {type(old).__name__}; expected linear layers query, key "
                    "and value in it"
                )
            kind = _OfTransformers if type(old).__module__.startswith("transformers.") else BertSparseSelfAttention
            made = kind(config, sparsity_config)
            made.query, made.key, made.value = old.query, old.key, old.value
            layer.attention.self = made.train(old.training)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """How many tokens were added to make whole blocks, then the five tensors with them."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise UsageError("neither input_ids nor inputs_embeds is given; expected one of them")
        added = -given.shape[1] % block_size
        if added == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

        def longer(ids: Tensor | None, value: int) -> Tensor | None:
            return None if ids is None else nn.functional.pad(ids, (0, added), value=value)

        if inputs_embeds is not None:
            ids = torch.full((len(given), added), pad_token_id, dtype=torch.long, device=given.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], dim=1)
        return (
            added,
            longer(input_ids, pad_token_id),
            longer(attention_mask, 0),
            longer(token_type_ids, 0),
            longer(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Without the tokens that were added."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
