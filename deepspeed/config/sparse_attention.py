"""The `sparse_attention` section: which blocks of the attention matrix are computed; model code reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .model import Count, PositiveCount, Section

__all__ = ["SparseAttentionConfig"]


class SparseAttentionConfig(Section):
    """Layout of block-sparse attention; each mode uses the keys that its description names."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field(
        "fixed", description="Kind of layout."
    )
    block: PositiveCount = Field(16, description="Width of a square block, in tokens (all modes).")
    different_layout_per_head: bool = Field(False, description="Whether each head has its own layout (all modes).")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        "bidirectional", description="Whether a token also attends to later tokens (fixed, variable)."
    )
    num_local_blocks: PositiveCount = Field(4, description="Number of blocks in a local window (fixed).")
    num_global_blocks: Count = Field(1, description="Number of blocks that all others attend to (fixed, bigbird).")
    horizontal_global_attention: bool = Field(
        False, description="Whether the global blocks attend to all others too (fixed, variable)."
    )
    num_different_global_patterns: PositiveCount = Field(
        1, description="Number of different choices of global blocks among the heads (fixed)."
    )
    num_random_blocks: Count = Field(0, description="Number of random blocks per row (variable, bigbird).")
    local_window_blocks: list[PositiveCount] = Field(
        [4], description="Sizes of the local windows, in blocks; the last one repeats (variable)."
    )
    global_block_indices: list[Count] = Field(
        [0], description="First block of each global range (variable, bslongformer)."
    )
    global_block_end_indices: list[Count] | None = Field(
        None, description="End of each global range; null means ranges of one block (variable, bslongformer)."
    )
    num_sliding_window_blocks: PositiveCount = Field(
        3, description="Width of the sliding window, in blocks (bigbird, bslongformer)."
    )
