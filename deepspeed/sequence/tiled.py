"""Computations that treat tokens one by one, tile by tile along the sequence: what they need inside exists for a tile.

[Note: one graph] Each tile is a checkpoint: its inside is thrown away and computed again when its gradient is due. All
tiles are parts of one autograd graph, which takes them one after the other in backward, adds up what they give to a
parameter, and hands the parameter its gradient once. So whoever waits for gradients (ZeRO at any stage, accumulation)
sees what it would see without tiles, and dropout and autocast are those of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "loss_over_tiles",
    "sequence_tiled_compute",
]


def sequence_tiled_compute(
    fn: Callable[..., Any],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Any:
    """`fn(**kwargs)` over tiles of the sequence, dim 1 of what is in `kwargs_to_shard`.

    Outputs of tiles are concatenated along `output_unshard_dimension`, or stacked where that is 0 and where they are
    scalars; then `output_reduction` takes the "mean" or the "sum" of all numbers, or with None leaves them. Which
    parameters take part is found by autograd itself; `compute_params` may name them and is not needed. Where `shards`
    do not divide `seqlen`, the last tile is shorter.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise UsageError(
            f"grad_requiring_tensor_key is {grad_requiring_tensor_key!r}, which is none of what is cut into tiles: "
            f"{sorted(kwargs_to_shard)}."
        )
    if output_reduction not in (None, "mean", "sum"):
        raise UsageError(f"output_reduction is {output_reduction!r}; expected None, 'mean' or 'sum'.")
    tiles = {name: _tiles(name, value, seqlen, shards) for name, value in kwargs_to_shard.items()}
    outputs = []
    for tile in range(len(tiles[grad_requiring_tensor_key])):
        part = {name: value[tile] for name, value in tiles.items()}
        outputs.append(checkpoint(fn, use_reentrant=False, **part, **kwargs_to_pass))
    return _join(outputs, output_unshard_dimension, output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` in the shape of an autograd function."""

    @staticmethod
    def apply(
        fn: Callable[..., Any],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Any:
        """`args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        cut = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:cut], strict=True)),
            dict(zip(keys_to_pass, args[cut:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """An MLP over tiles: `TiledMLP.apply(fn, module, x, shards, compute_params)` is `fn(module, x)`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """`x` is [batch, length, width] or [length, width]."""
        along = x.dim() - 2
        parts = x.split(_size(x.shape[along], shards), along)
        return torch.cat([checkpoint(fn, self, part, use_reentrant=False) for part in parts], along)


class TiledFusedLogitsLoss:
    """Logits and their loss over tiles, so that logits exist for a tile only."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """`fn(module, x, y)` of tiles of all tokens in one row, added up ("sum") or averaged ("mean").

        `x` and `y` are [batch, length, …] and tiles of them [tokens, …]; a tile of `mask`, [batch, length], is a fourth
        argument of `fn` where there is one.
        """
        _agree(x, y, mask)
        rows = [each.flatten(0, 1) for each in (x, y, mask) if each is not None]
        return loss_over_tiles(fn, self, rows, 0, shards, output_reduction)


def loss_over_tiles(
    fn: Callable[..., Tensor], self: Any, given: Sequence[Tensor], dim: int, shards: int, reduction: str
) -> Tensor:
    """`fn(module, *tiles)` of tensors that are cut along `dim`, added up ("sum") or averaged ("mean")."""
    if reduction not in ("mean", "sum"):
        raise UsageError(f"output_reduction is {reduction!r}; losses of tiles are joined by 'mean' or 'sum'.")
    tiles = zip(*(each.split(_size(each.shape[dim], shards), dim) for each in given), strict=True)
    return _join([checkpoint(fn, self, *tile, use_reentrant=False) for tile in tiles], 0, reduction)  # type: ignore[no-any-return]


def _agree(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
    """An error unless there is a label, and with a mask a place in it, for each token."""
    shapes = {name: tuple(each.shape) for name, each in (("x", x), ("y", y), ("mask", mask)) if each is not None}
    short = min(map(len, shapes.values())) < 2 or (mask is not None and mask.dim() != 2)
    if short or len({shape[:2] for shape in shapes.values()}) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise UsageError(f"found {found}; expected x and y as [batch, length, …] and mask as [batch, length].")


def _size(length: int, shards: int) -> int:
    """Tokens of a tile, all but the last of equal size."""
    if not isinstance(shards, int) or shards < 1:
        raise UsageError(f"the number of tiles is {shards!r}; expected a whole number above zero.")
    return max(1, -(-length // shards))


def _tiles(name: str, value: Any, seqlen: int, shards: int) -> Sequence[Any]:
    if value is None:
        return [None] * len(range(0, seqlen, _size(seqlen, shards)))
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != seqlen:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"{name} is to be cut into tiles of a sequence of {seqlen}; found {found}, expected [batch, "
            f"{seqlen}, …]. Put it into kwargs_to_pass if it is the same for all tiles."
        )
    return list(value.split(_size(seqlen, shards), 1))


def _join(outputs: list[Any], dim: int, reduction: str | None) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(each), dim, reduction) for each in zip(*outputs, strict=True))
    joined = torch.cat(outputs, dim) if dim and outputs[0].dim() else torch.stack(outputs)
    if reduction is None:
        return joined
    return joined.mean() if reduction == "mean" else joined.sum()
