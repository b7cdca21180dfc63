"""`SparseSelfAttention`: attention of a model over the blocks of a pattern, its own or that of the engine's config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config.attention import SparseAttentionConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.registry import op
from deepspeed.ops.sparse_attention import sparsity_config as patterns
from deepspeed.ops.sparse_attention.attend import BlockPattern
from deepspeed.ops.sparse_attention.blocks import MatMul, Softmax, as_bias
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig

__all__ = ["SparseSelfAttention"]

_MODES = {
    "dense": patterns.DenseSparsityConfig,
    "fixed": patterns.FixedSparsityConfig,
    "variable": patterns.VariableSparsityConfig,
    "bigbird": patterns.BigBirdSparsityConfig,
    "bslongformer": patterns.BSLongformerSparsityConfig,
}
_LENGTHS = 8
"""Lengths whose patterns are kept."""


def sparsity_of(section: SparseAttentionConfig, num_heads: int) -> SparsityConfig:
    """The pattern that a config's `sparse_attention` describes."""
    try:
        made: SparsityConfig = _MODES[section.mode](num_heads=num_heads, **section.arguments)
    except UsageError as error:
        raise DeepSpeedConfigError(f"sparse_attention: {error}", path="sparse_attention") from error
    return made


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of `sparsity_config`; None is the pattern of the config that an engine is built with.

    Sequences have any length up to `max_seq_length`; the last block may be cut short. Shorter sequences see the first
    blocks of the longest one's layout. The layout is saved with the model where `sparsity_config` is given.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise UsageError(f"{name} is {mode!r}; expected 'add' or 'mul'")
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.sparsity_config: SparsityConfig | None = None
        self.section: SparseAttentionConfig | None = None
        self._patterns: dict[tuple[int, torch.device], BlockPattern] = {}
        if sparsity_config is not None:
            self._set(sparsity_config, saved=True)

    def _set(self, sparsity_config: SparsityConfig, *, saved: bool, device: torch.device | None = None) -> None:
        block = sparsity_config.block
        layout = sparsity_config.make_layout(-(-self.max_seq_length // block) * block)
        self.register_buffer("master_layout", layout.to(device), persistent=saved)
        self.sparsity_config = sparsity_config

    def _known(self, query: Tensor) -> SparsityConfig:
        """The pattern; that of the engine's config is made once the number of heads is known."""
        if self.sparsity_config is None:
            if self.section is None:
                raise UsageError(
                    "this SparseSelfAttention has no sparsity_config; give it one, or a sparse_attention section to "
                    "the config of deepspeed.initialize"
                )
            self._set(sparsity_of(self.section, query.shape[1]), saved=False, device=query.device)
        assert self.sparsity_config is not None, "set by now"
        return self.sparsity_config

    def _load_from_state_dict(self, *args: Any) -> None:
        self._patterns.clear()  # of the layout before
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_patterns": {}}  # their functions cannot be pickled

    def get_layout(self, L: int) -> Tensor:
        """The layout [heads, blocks, blocks] for sequences of L tokens."""
        if self.sparsity_config is None:
            raise UsageError("the pattern is that of the engine's config, and is made in the first forward")
        if self.max_seq_length < L:
            raise UsageError(
                f"a sequence has {L} tokens, and max_seq_length is {self.max_seq_length}; build SparseSelfAttention "
                f"with max_seq_length={L} or more"
            )
        blocks = -(-L // self.sparsity_config.block)
        layout: Tensor = self.get_buffer("master_layout")[:, :blocks, :blocks]
        return layout

    def get_ops(self, H: int, L: int) -> tuple[MatMul, MatMul, Softmax]:
        """Scores, values and softmax over the blocks, for sequences of whole blocks."""
        layout, block = self.get_layout(L)[:H], self._block
        return (
            MatMul(layout, block, "sdd", trans_b=True),
            MatMul(layout, block, "dsd"),
            Softmax(layout, block),
        )

    @property
    def _block(self) -> int:
        assert self.sparsity_config is not None, "a pattern is known by now"
        return self.sparsity_config.block

    def transpose_key_for_scores(self, x: Tensor, L: int) -> Tensor:
        """Keys as [batch, heads, length, d], also where they come as [batch, heads, d, length]."""
        return x.transpose(-2, -1) if x.shape[-2] != L and x.shape[-1] == L else x

    def transpose_mask_for_sparse(self, qtype: torch.dtype, x: Tensor, is_key_padding_mask: bool = False) -> Tensor:
        """A mask in the dtype of queries, without dims of one: [batch, length], or [length, length]."""
        kept = x if x.dtype is torch.bool else x.to(qtype)
        dims = range(1, x.dim() - 1) if is_key_padding_mask else range(x.dim() - 2)
        return kept.squeeze(tuple(dim for dim in dims if x.shape[dim] == 1))

    def _pattern(self, query: Tensor) -> BlockPattern:
        config, (heads, length) = self._known(query), query.shape[1:3]
        place = (length, query.device)
        if place not in self._patterns:
            layout = self.get_layout(length).to(query.device)
            if not config.different_layout_per_head:
                layout = layout[:1]
            elif len(layout) != heads:
                raise UsageError(
                    f"queries have {heads} heads, and the layout has {len(layout)} different ones; give the "
                    f"sparsity config num_heads={heads}"
                )
            while len(self._patterns) >= _LENGTHS:
                del self._patterns[next(iter(self._patterns))]
            self._patterns[place] = BlockPattern(layout, config.block, length, config.causal)
        return self._patterns[place]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of [batch, heads, length, d]; a query that may attend to nothing gets zeros.

        `rpe` is added to the scores [batch, heads, length, length]. `key_padding_mask` is [batch, length], `attn_mask`
        [length, length] or broadcast to the scores: added, or with mode `mul`, and for booleans, zero where nothing may
        be attended to.
        """
        if query.dim() != 4:
            raise UsageError(f"query has shape {tuple(query.shape)}; expected [batch, heads, length, d]")
        length = query.shape[2]
        key = self.transpose_key_for_scores(key, length)
        if not query.shape == key.shape == value.shape:
            raise UsageError(
                f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
                "self-attention needs equal ones"
            )
        biases = [] if rpe is None else [rpe]
        wide = torch.promote_types(query.dtype, torch.float32)
        if key_padding_mask is not None:
            mask = self.transpose_mask_for_sparse(query.dtype, key_padding_mask, is_key_padding_mask=True)
            biases.append(as_bias(mask, self.key_padding_mask_mode, wide)[:, None, None, :])
        if attn_mask is not None:
            biases.append(as_bias(attn_mask, self.attn_mask_mode, wide))
        for bias in biases:
            if bias.dim() not in (2, 4) or any(size not in (1, length) for size in bias.shape[-2:]):
                raise UsageError(
                    f"a mask or bias has shape {tuple(bias.shape)}, and sequences have {length} tokens; expected 2 "
                    "or 4 dims, the last two of 1 or that"
                )
        out: Tensor = op("sparse_attention")(query, key, value, self._pattern(query), biases)
        return out


def give_patterns(section: SparseAttentionConfig | None, model: nn.Module, *, whole: bool) -> None:
    """Give the config's pattern to what asks for it: each SparseSelfAttention without one of its own.

    In a model that is not `whole`, such as a stage of a pipeline, there may be none.
    """
    layers = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    asking = [layer for layer in layers if layer.sparsity_config is None]
    if section is None:
        if asking:
            raise DeepSpeedConfigError(
                f"sparse_attention is not given, and {len(asking)} SparseSelfAttention modules of the model have no "
                "sparsity_config; add the section, or give them one",
                path="sparse_attention",
            )
        return
    sparsity_of(section, 1)  # what it contradicts is said here, not in the first forward
    if whole and not layers:
        raise DeepSpeedConfigError(
            "sparse_attention is given, and no module of the model is a SparseSelfAttention, which would use it; put "
            "deepspeed.ops.sparse_attention.SparseSelfAttention in the model, or remove the section",
            path="sparse_attention",
        )
    for layer in asking:
        layer.section = section
