"""Products and softmax of tensors that hold the blocks of a layout: [batch, blocks that are there, block, block].

Blocks lie in the order of `layout.nonzero()`: by head, then row, then column.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["MatMul", "Softmax"]


class _Blocks:
    """A layout [heads, rows, columns], and where its blocks lie."""

    def __init__(self, layout: Tensor, block: int) -> None:
        self.layout = layout
        self.block = block
        self.heads, self.rows, self.columns = layout.shape
        self._places: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Head, row and column of each block."""
        if device not in self._places:
            head, row, column = self.layout.nonzero().to(device).unbind(1)
            self._places[device] = (head, row, column)
        return self._places[device]

    def gathered(self, dense: Tensor) -> Tensor:
        """The blocks of [batch, heads, rows × block, columns × block]."""
        head, row, column = self.places(dense.device)
        tiles = dense.unflatten(3, (self.columns, self.block)).unflatten(2, (self.rows, self.block))
        found: Tensor = tiles.transpose(3, 4)[:, head, row, column]
        return found

    def require_blocks(self, name: str, given: Tensor) -> None:
        """Refuse a tensor that does not have these blocks."""
        expected = (int(self.layout.count_nonzero()), self.block, self.block)
        if given.dim() != 4 or tuple(given.shape[1:]) != expected:
            raise UsageError(
                f"{name} has shape {tuple(given.shape)}; expected [batch, {', '.join(map(str, expected))}]: the blocks "
                "of the layout"
            )

    def require_dense(self, name: str, given: Tensor, dim: int, blocks: int) -> None:
        """Refuse a tensor [batch, heads, …] whose `dim` is not as long as that many blocks."""
        if given.dim() != 4 or given.shape[1] != self.heads or given.shape[dim] != blocks * self.block:
            raise UsageError(
                f"{name} has shape {tuple(given.shape)}; expected 4 dims, {self.heads} heads in dim 1, and "
                f"{blocks} blocks of {self.block} in dim {dim}"
            )


class MatMul:
    """A product of which one part holds blocks: the result (`sdd`), the left (`dsd`) or the right factor (`dds`).

    Dense tensors are [batch, heads, rows, columns]. `trans_a` and `trans_b` say that a factor comes transposed.
    """

    def __init__(
        self, layout: Tensor, block: int, mode: str, trans_a: bool = False, trans_b: bool = False, bench: bool = False
    ) -> None:
        if mode not in ("sdd", "dsd", "dds"):
            raise UsageError(f"mode is {mode!r}; expected 'sdd', 'dsd' or 'dds'")
        if bench:
            raise UsageError("bench is true, and products are not timed here; set it to false, and use torch.profiler")
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b
        self._blocks = _Blocks(layout, block)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """The product."""
        if self.mode == "sdd":
            return self._to_blocks(
                a.transpose(-2, -1) if self.trans_a else a, b.transpose(-2, -1) if self.trans_b else b
            )
        if self.mode == "dsd":
            return self._from_blocks(a, b.transpose(-2, -1) if self.trans_b else b, turned=self.trans_a)
        # A·B is (Bᵀ·Aᵀ)ᵀ, and there the blocks come first.
        right = a if self.trans_a else a.transpose(-2, -1)
        return self._from_blocks(b, right, turned=not self.trans_b).transpose(-2, -1)

    def _to_blocks(self, a: Tensor, b: Tensor) -> Tensor:
        known = self._blocks
        known.require_dense("a", a, 2, known.rows)
        known.require_dense("b", b, 3, known.columns)
        head, row, column = known.places(a.device)
        left: Tensor = a.unflatten(2, (known.rows, known.block))[:, head, row]  # [batch, blocks, block, inner]
        right: Tensor = b.unflatten(3, (known.columns, known.block)).movedim(3, 2)[:, head, column]
        return left @ right

    def _from_blocks(self, blocks: Tensor, dense: Tensor, *, turned: bool) -> Tensor:
        """Blocks, or their transposed tensor, times a dense one."""
        known = self._blocks
        known.require_blocks("the factor of blocks", blocks)
        head, row, column = known.places(dense.device)
        out, inner, rows = (column, row, known.columns) if turned else (row, column, known.rows)
        known.require_dense("the dense factor", dense, 2, known.rows if turned else known.columns)
        right = dense.unflatten(2, (-1, known.block))[:, head, inner]
        parts = (blocks.transpose(-2, -1) if turned else blocks) @ right  # [batch, blocks, block, width]
        sums: Tensor = parts.new_zeros(parts.shape[0], known.heads * rows, *parts.shape[2:])
        return sums.index_add(1, head * rows + out, parts).view(len(parts), known.heads, rows * known.block, -1)


def as_bias(mask: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """What is added to scores: a mask in mode `add` as it is, in mode `mul` -inf where it is 0."""
    if mode not in ("add", "mul"):
        raise UsageError(f"the mode of a mask is {mode!r}; expected 'add' or 'mul'")
    if mode == "mul" or mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask == 0, -math.inf)
    return mask.to(dtype)


class Softmax:
    """Softmax over the rows of a layout; what is not in a block has no weight, and a row without any gets zeros."""

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        if bench:
            raise UsageError("bench is true, and softmax is not timed here; set it to false, and use torch.profiler")
        self._blocks = _Blocks(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """Weights of x · scale + rpe + masks.

        rpe is broadcast to [batch, heads, rows, columns]; key_padding_mask is [batch, columns], attn_mask [rows,
        columns].
        """
        known = self._blocks
        known.require_blocks("x", x)
        wide = torch.promote_types(x.dtype, torch.float32)
        biases = [] if rpe is None else [rpe.to(wide)]
        if key_padding_mask is not None:
            biases.append(as_bias(key_padding_mask, key_padding_mask_mode, wide)[:, None, None, :])
        if attn_mask is not None:
            biases.append(as_bias(attn_mask, attn_mask_mode, wide))
        scores = x.to(wide) * scale
        whole = (x.shape[0], known.heads, known.rows * known.block, known.columns * known.block)
        for bias in biases:
            scores = scores + known.gathered(bias.expand(whole))
        return self._weights(scores).to(x.dtype)

    def _weights(self, scores: Tensor) -> Tensor:
        known = self._blocks
        head, row, _ = known.places(scores.device)
        rows = known.heads * known.rows
        at = head * known.rows + row  # the row of blocks that a block lies in
        shape = (scores.shape[0], rows, known.block)
        where = at[None, :, None].expand(scores.shape[0], -1, known.block)
        most = scores.new_full(shape, -math.inf).scatter_reduce(1, where, scores.detach().amax(-1), "amax")
        shift = most.masked_fill(most == -math.inf, 0.0)[:, at].unsqueeze(-1)
        powers = (scores - shift).exp()
        sums = powers.new_zeros(shape).index_add(1, at, powers.sum(-1))
        sums = sums.masked_fill(sums == 0, 1.0)
        return powers / sums[:, at].unsqueeze(-1)
