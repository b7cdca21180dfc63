"""Attention over the blocks of a layout: torch's flex attention on a GPU, a masked product elsewhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.registry import implements, reference

_TILE = 128
"""Tokens of a tile of flex attention's kernels; its blocks are multiples of it."""
_SMALLEST_HEAD = 16
"""Elements of a head that its kernels can multiply."""
_SMALL_TILES = {
    "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32, "num_warps": 4,
}  # fmt: skip
"""Of its kernels, where a row of blocks has so much more than others that all wait for it."""
_UNEVEN = 4
"""So many times the mean."""


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """Which tokens of a sequence attend to which."""

    layout: Tensor  # [heads, or one for all of them, blocks, blocks]
    block: int
    length: int
    """Tokens; the last block may be cut short."""
    causal: bool = False

    @functools.cached_property
    def allowed(self) -> Tensor:
        """[heads, length, length], True where a query (row) attends to a key (column)."""
        one_way = self.layout.bool().repeat_interleave(self.block, 1)[:, : self.length]
        allowed = one_way.repeat_interleave(self.block, 2)[:, :, : self.length]
        return allowed.tril() if self.causal else allowed

    @functools.cached_property
    def block_mask(self) -> Any:
        """What flex attention calculates: larger blocks, with a function for those that are not whole."""
        from torch.nn.attention.flex_attention import BlockMask

        layout, block, causal, one = self.layout.bool(), self.block, self.causal, len(self.layout) == 1
        size = math.lcm(block, _TILE)
        some, whole = self._larger(size)

        def allows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            there = layout[torch.zeros_like(head) if one else head, query // block, key // block]
            return there & (query >= key) if causal else there

        def listed(which: Tensor) -> tuple[Tensor, Tensor]:
            order = which.int().argsort(dim=-1, descending=True, stable=True)
            return which.sum(-1).int()[None], order.int()[None]

        return BlockMask.from_kv_blocks(
            *listed(some & ~whole),
            *listed(whole),
            BLOCK_SIZE=size,
            mask_mod=allows,
            seq_lengths=(self.length, self.length),
        )

    @functools.cached_property
    def uneven(self) -> bool:
        """True if some tokens attend to far more than most, or are attended to by far more."""
        layout = self.layout.float()
        most = max(float(layout.sum(dim).amax()) for dim in (1, 2))
        return most * layout.shape[1] * len(layout) > _UNEVEN * float(layout.sum())

    def _larger(self, size: int) -> tuple[Tensor, Tensor]:
        """For blocks of `size` tokens: whether there is something in them, and whether nothing is left out."""
        each = size // self.block
        missing = -self.layout.shape[1] % each
        layout = nn.functional.pad(self.layout.bool(), (0, missing, 0, missing))
        tiles = layout.unflatten(2, (-1, each)).unflatten(1, (-1, each))  # [heads, rows, each, columns, each]
        some, whole = tiles.any(4).any(2), tiles.all(4).all(2)
        return some, whole & ~torch.eye(some.shape[1], dtype=torch.bool, device=some.device) if self.causal else whole


@reference("sparse_attention")
def attend(query: Tensor, key: Tensor, value: Tensor, pattern: BlockPattern, biases: Sequence[Tensor] = ()) -> Tensor:
    """softmax(Q·Kᵀ/√d + biases)·V over what the pattern allows; tensors are [batch, heads, length, d].

    A bias is broadcast to the scores [batch, heads, length, length]. A query that may attend to nothing gets zeros.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):  # it would multiply in 16 bits
        scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) / math.sqrt(query.shape[-1])
        for bias in biases:
            scores = scores + bias
        scores = scores.masked_fill(~pattern.allowed, -math.inf)
        nothing = scores.detach().amax(-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return (weights @ value.to(wide)).to(query.dtype)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)  # uncompiled it would hold all scores


@implements("sparse_attention", name="flex", requires=has_triton & on_cuda, rank=20)
def attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, pattern: BlockPattern, biases: Sequence[Tensor] = ()
) -> Tensor:
    """The same without the scores of blocks that the pattern leaves out, and without keeping any."""
    if not query.is_cuda:
        return attend(query, key, value, pattern, biases)
    return flex(_compiled(), query, key, value, pattern, biases)


def flex(
    run: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Call flex attention, which `run` is, compiled or not."""
    width = query.shape[-1]
    if width < _SMALLEST_HEAD:
        query, key, value = (nn.functional.pad(each, (0, _SMALLEST_HEAD - width)) for each in (query, key, value))
    wide = tuple(bias.reshape((1,) * (4 - bias.dim()) + bias.shape) for bias in biases)

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        for bias in wide:
            places = zip((batch, head, row, column), bias.shape, strict=True)
            score = score + bias[tuple(at if size > 1 else torch.zeros_like(at) for at, size in places)]
        return score

    # Biases take the shared memory in which further steps would be loaded.
    options = {**(_SMALL_TILES if pattern.uneven else {}), **({"num_stages": 1} if wide else {})}
    out = run(
        query,
        key,
        value,
        score_mod=biased if wide else None,
        block_mask=pattern.block_mask,
        scale=1 / math.sqrt(width),
        kernel_options=options or None,
    )
    return out[..., :width].contiguous()
