"""The `sparse_attention` section: the blocks that attention of a model is limited to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .model import Count, Lower, NoEffect, PositiveCount, Section, key

__all__ = ["SparseAttentionConfig"]


_SHARED = ("block", "different_layout_per_head")
_KEYS = {
    "dense": (),
    "fixed": (
        "num_local_blocks",
        "num_global_blocks",
        "attention",
        "horizontal_global_attention",
        "num_different_global_patterns",
    ),
    "variable": (
        "num_random_blocks",
        "local_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
        "attention",
        "horizontal_global_attention",
    ),
    "bigbird": ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "attention"),
    "bslongformer": ("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices", "attention"),
}
"""What each mode reads besides the shared keys."""


def _by_mode(name: str) -> NoEffect:
    """Marks a key that some modes do not read."""
    modes = [mode for mode, keys in _KEYS.items() if name in keys]

    def unread(schema: Any) -> bool:
        section = schema.sparse_attention
        return section is not None and section.mode not in modes

    return NoEffect(f"sparse_attention.mode is not {' or '.join(modes)}", unread)


class SparseAttentionConfig(Section):
    """The pattern for modules of the model that ask for it."""

    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], Lower] = key(
        "fixed", "The pattern."
    )
    block: PositiveCount = key(16, "Tokens in a block.")
    different_layout_per_head: bool = key(False, "Whether heads have different layouts.")
    num_local_blocks: PositiveCount = key(4, "Blocks in a window.", _by_mode("num_local_blocks"))
    num_global_blocks: Count = key(
        1, "Global blocks: of each window (fixed), or the first ones (bigbird).", _by_mode("num_global_blocks")
    )
    attention: Annotated[Literal["bidirectional", "unidirectional"], Lower] = key(
        "bidirectional", "Whether tokens attend to later ones.", _by_mode("attention")
    )
    horizontal_global_attention: bool = key(
        False, "Whether global blocks attend to all others.", _by_mode("horizontal_global_attention")
    )
    num_different_global_patterns: PositiveCount = key(
        1, "Choices of global blocks, over the heads.", _by_mode("num_different_global_patterns")
    )
    num_random_blocks: Count = key(0, "Blocks at random that each block attends to.", _by_mode("num_random_blocks"))
    local_window_blocks: list[PositiveCount] = key(
        [4],
        "Blocks in the first windows; the last number holds for all that follow.",
        _by_mode("local_window_blocks"),
        min_length=1,
    )
    global_block_indices: list[Count] = key(
        [0], "Global blocks, or where spans of them begin.", _by_mode("global_block_indices")
    )
    global_block_end_indices: list[PositiveCount] | None = key(
        None, "Where these spans end; null is one block each.", _by_mode("global_block_end_indices")
    )
    num_sliding_window_blocks: PositiveCount = key(
        3, "Blocks in the window around each block.", _by_mode("num_sliding_window_blocks")
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """What the class of the pattern takes besides the number of heads: the keys that the mode reads."""
        return {name: getattr(self, name) for name in (*_SHARED, *_KEYS[self.mode])}
