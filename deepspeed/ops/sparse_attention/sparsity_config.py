"""Patterns of block-sparse attention: which blocks of keys each block of queries attends to.

A layout is a tensor [heads, blocks, blocks] of zeros and ones. Ranks and runs with equal arguments have equal layouts:
random blocks come from a generator of their own, which begins with `seed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]


def _require_counts(owner: object, least: int, *names: str) -> None:
    for name in names:
        given = getattr(owner, name)
        for count in given if isinstance(given, list) else [given]:
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise UsageError(
                    f"{type(owner).__name__}: {name} is {count!r}; expected a whole number from {least} on"
                )


@dataclass(eq=False)
class SparsityConfig:
    """What all patterns share: heads, tokens in a block, and whether heads differ. Subclasses fill the layout."""

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    attention = "bidirectional"
    """`unidirectional`: a token attends to itself and to those before it, also inside a block."""
    horizontal_global_attention = False
    """Whether global blocks attend to all others."""

    def __post_init__(self) -> None:
        _require_counts(self, 1, "num_heads", "block")
        if self.attention not in ("bidirectional", "unidirectional"):
            raise UsageError(f"attention is {self.attention!r}; expected 'bidirectional' or 'unidirectional'")
        if self.horizontal_global_attention and self.causal:
            raise UsageError(
                "horizontal_global_attention is true with attention 'unidirectional', where global blocks cannot "
                "attend to later ones; set it to false, or attention to 'bidirectional'"
            )

    @property
    def num_layout_heads(self) -> int:
        """Heads with layouts of their own."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def causal(self) -> bool:
        """True if no token attends to a later one."""
        return self.attention == "unidirectional"

    def setup_layout(self, seq_len: int) -> Tensor:
        """A layout [heads, blocks, blocks] without any block."""
        if seq_len < 1 or seq_len % self.block:
            raise UsageError(
                f"a layout for {seq_len} tokens was asked for, and block is {self.block}; expected a multiple of "
                f"{self.block}, such as {-(-max(seq_len, 1) // self.block) * self.block}"
            )
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give every head the layout of the first one, unless heads differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def fill(self, h: int, layout: Tensor) -> None:
        """Set the blocks of head `h` in place; blocks after the diagonal are taken out where none may be."""
        raise UsageError(
            f"{type(self).__name__} has no pattern; use one of its subclasses, such as FixedSparsityConfig"
        )

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout [heads, blocks, blocks] for a sequence; 1 where a block attends to another."""
        layout = self.setup_layout(seq_len)
        for h in range(self.num_layout_heads):
            self.fill(h, layout)
        if self.causal:
            layout.tril_()
        return self.check_and_propagate_first_head_layout(layout)


def _require_fit(owner: object, head: Tensor, name: str) -> None:
    count = getattr(owner, name)
    if count > len(head):
        raise UsageError(
            f"{type(owner).__name__}: {name} is {count}, and the sequence has {len(head)} blocks; give at most "
            f"{len(head)}, smaller blocks, or longer sequences"
        )


class _Sliding(SparsityConfig):
    """A pattern with a sliding window."""

    num_sliding_window_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_counts(self, 1, "num_sliding_window_blocks")

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let each block attend to those at most half a window away."""
        _require_fit(self, layout[h], "num_sliding_window_blocks")
        rows = torch.arange(layout.shape[1])
        layout[h][(rows[:, None] - rows).abs() <= self.num_sliding_window_blocks // 2] = 1
        return layout


class _Scattered(SparsityConfig):
    """A pattern with blocks at random."""

    num_random_blocks: int
    seed: int

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let each block attend to `num_random_blocks` others, or to all that come before where these are fewer."""
        _require_fit(self, layout[h], "num_random_blocks")
        generator = torch.Generator().manual_seed(self.seed + h)
        for row, blocks in enumerate(layout[h]):
            choices = row + 1 if self.causal else len(blocks)
            blocks[torch.randperm(choices, generator=generator)[: self.num_random_blocks]] = 1
        return layout


class _Placed(SparsityConfig):
    """A pattern with global blocks at given places."""

    global_block_indices: Sequence[int]
    global_block_end_indices: Sequence[int] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.global_block_indices = list(self.global_block_indices)
        if self.global_block_end_indices is not None:
            self.global_block_end_indices = list(self.global_block_end_indices)
        _ = self.global_spans

    @property
    def global_spans(self) -> list[tuple[int, int]]:
        """Global blocks as half-open intervals."""
        starts, ends = self.global_block_indices, self.global_block_end_indices
        if ends is None:
            ends = [start + 1 for start in starts]
        if len(ends) != len(starts) or any(not 0 <= start < end for start, end in zip(starts, ends, strict=False)):
            raise UsageError(
                f"{type(self).__name__}: global_block_indices is {list(starts)} and global_block_end_indices "
                f"{list(ends)}; expected as many ends as starts, each above its start, and no negative one"
            )
        return list(zip(starts, ends, strict=True))


@dataclass(eq=False)
class DenseSparsityConfig(SparsityConfig):
    """Every block attends to every other."""

    def fill(self, h: int, layout: Tensor) -> None:
        """All blocks."""
        layout[h] = 1


@dataclass(eq=False)
class FixedSparsityConfig(SparsityConfig):
    """Windows of blocks that attend to each other, and to some blocks of every window."""

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_counts(self, 1, "num_local_blocks", "num_global_blocks", "num_different_global_patterns")
        if self.num_local_blocks % self.num_global_blocks:
            raise UsageError(
                f"num_local_blocks is {self.num_local_blocks} and num_global_blocks {self.num_global_blocks}; the "
                "second must divide the first"
            )
        patterns = self.num_local_blocks // self.num_global_blocks
        if self.num_different_global_patterns > patterns:
            raise UsageError(
                f"num_different_global_patterns is {self.num_different_global_patterns}; a window of "
                f"{self.num_local_blocks} blocks with {self.num_global_blocks} global ones has at most {patterns}"
            )
        if self.num_different_global_patterns > 1 and not self.different_layout_per_head:
            raise UsageError(
                f"num_different_global_patterns is {self.num_different_global_patterns}, and all heads have one "
                "layout; set different_layout_per_head to true"
            )

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let the blocks of a window attend to each other."""
        window = torch.arange(layout.shape[1]) // self.num_local_blocks
        layout[h][window[:, None] == window] = 1
        return layout

    def _global_starts(self, h: int, blocks: int) -> Iterator[int]:
        """The first global block of each window; later patterns lie further from the end of the window."""
        pattern = h % self.num_different_global_patterns
        offset = self.num_local_blocks - (1 + pattern) * self.num_global_blocks
        for window in range(0, blocks, self.num_local_blocks):  # the last one may be cut short
            yield max(0, min(window + offset, blocks - self.num_global_blocks))

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let all blocks attend to the global ones, and global ones to all where attention is horizontal too."""
        for start in self._global_starts(h, layout.shape[1]):
            chosen = slice(start, start + self.num_global_blocks)
            layout[h, :, chosen] = 1
            if self.horizontal_global_attention:
                layout[h, chosen] = 1
        return layout

    def fill(self, h: int, layout: Tensor) -> None:
        """Windows and global blocks."""
        self.set_local_layout(h, layout)
        self.set_global_layout(h, layout)


@dataclass(eq=False)
class VariableSparsityConfig(_Scattered, _Placed):
    """Windows of several sizes, global blocks at given places, and blocks at random."""

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local_window_blocks = list(self.local_window_blocks)
        _require_counts(self, 0, "num_random_blocks")
        _require_counts(self, 1, "local_window_blocks")
        if not self.local_window_blocks:
            raise UsageError("local_window_blocks is empty; give the size of at least one window, in blocks")

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let the blocks of a window attend to each other; the last size holds for all windows that follow."""
        begin, sizes = 0, iter(self.local_window_blocks)
        size = 1
        while begin < layout.shape[1]:
            size = next(sizes, size)
            layout[h, begin : begin + size, begin : begin + size] = 1
            begin += size
        return layout

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let all blocks attend to the global ones, and global ones to all where attention is horizontal too."""
        for start, end in self.global_spans:
            layout[h, :, start:end] = 1
            if self.horizontal_global_attention:
                layout[h, start:end] = 1
        return layout

    def fill(self, h: int, layout: Tensor) -> None:
        """Random blocks, windows and global blocks."""
        self.set_random_layout(h, layout)
        self.set_local_layout(h, layout)
        self.set_global_layout(h, layout)


@dataclass(eq=False)
class BigBirdSparsityConfig(_Sliding, _Scattered):
    """A sliding window, the first blocks as global ones, and blocks at random."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_counts(self, 0, "num_random_blocks", "num_global_blocks")

    def set_global_layout_itc(self, h: int, layout: Tensor) -> Tensor:
        """Let the first blocks attend to all, and all to them."""
        _require_fit(self, layout[h], "num_global_blocks")
        layout[h, : self.num_global_blocks] = 1
        layout[h, :, : self.num_global_blocks] = 1
        return layout

    def fill(self, h: int, layout: Tensor) -> None:
        """Random blocks, neighbours and global blocks."""
        self.set_random_layout(h, layout)
        self.set_sliding_window_layout(h, layout)
        self.set_global_layout_itc(h, layout)


@dataclass(eq=False)
class BSLongformerSparsityConfig(_Sliding, _Placed):
    """A sliding window, and global blocks at given places."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """Let global blocks attend to all, and all to them."""
        for start, end in self.global_spans:
            layout[h, start:end] = 1
            layout[h, :, start:end] = 1
        return layout

    def fill(self, h: int, layout: Tensor) -> None:
        """Neighbours and global blocks."""
        self.set_sliding_window_layout(h, layout)
        self.set_global_layout(h, layout)


@dataclass(eq=False)
class LocalSlidingWindowSparsityConfig(_Sliding):
    """A sliding window alone."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def fill(self, h: int, layout: Tensor) -> None:
        """Neighbours."""
        self.set_sliding_window_layout(h, layout)
