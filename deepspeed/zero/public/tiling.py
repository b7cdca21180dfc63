"""`TiledLinear`: a linear layer cut into tiles that are modules of their own, so that each is gathered by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.zero.public.gathered import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]


class TiledLinear(nn.Module):
    """A linear layer as `out_splits` × `in_splits` tiles, in `linears[out][in]`; the bias is in the last tile of a row.

    Sizes that do not divide evenly give the first tiles one element more. With `input_is_already_split` the input is a
    sequence of `in_splits` tensors; without `combine_out_splits` the output is a list of `out_splits` tensors. Tiles
    are built by `linear_cls(in, out, bias=..., **kwargs)` and initialise themselves, unless `init_linear` gives the
    values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        self.out_parts = _bounds("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """The product, tile by tile."""
        inputs = self._parts_of(input_)
        outputs = [self._row(row, inputs) for row in self.linears]
        return self._combined(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over weight and bias of a linear layer of the same sizes; of rank 0 where the tiles are sharded."""
        with GatheredParameters(other.parameters()):
            weight, bias = self._given(other)
            rows: Any = self.linears
            biases = [None] * len(rows) if bias is None else bias.tensor_split(self.out_splits)
            for row, high, of_row in zip(rows, weight.tensor_split(self.out_splits), biases, strict=True):
                for tile, part in zip(row, high.tensor_split(self.in_splits, dim=1), strict=True):
                    with GatheredParameters(tile.parameters(), modifier_rank=0):
                        tile.weight.copy_(part)
                        if of_row is not None and tile is row[-1]:
                            tile.bias.copy_(of_row)

    def extra_repr(self) -> str:
        """The sizes and the splits."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _parts_of(self, input_: Any) -> Sequence[Tensor]:
        sizes = _sizes(self.in_parts)
        if isinstance(input_, Tensor) and not self.input_is_already_split:
            if input_.shape[-1:] != (self.in_features,):
                raise UsageError(
                    f"TiledLinear takes an input whose last dim has {self.in_features} elements (in_features), found "
                    f"shape {tuple(input_.shape)}"
                )
            return split_tensor_along_last_dim(input_, sizes)
        found = [int(part.shape[-1]) for part in input_] if isinstance(input_, (list, tuple)) else None
        if found != sizes or not self.input_is_already_split:
            wanted = (
                f"{self.in_splits} tensors whose last dims are {sizes}" if self.input_is_already_split else "a tensor"
            )
            raise UsageError(
                f"TiledLinear with input_is_already_split={self.input_is_already_split} takes {wanted}, found "
                f"{type(input_).__name__ if found is None else f'{len(found)} tensors whose last dims are {found}'}"
            )
        return list(input_)

    def _row(self, row: Any, inputs: Sequence[Tensor]) -> Any:
        total: Any = None
        for tile, part in zip(row, inputs, strict=True):
            product = tile(part)
            total = product if total is None else total + product
        return total

    def _combined(self, outputs: list[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _given(self, other: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of `other`, if they fit."""
        bias = getattr(other, "bias", None)
        found, wanted = tuple(other.weight.shape), (self.out_features, self.in_features)
        if found != wanted:
            raise UsageError(f"copy_params_from: the weight has shape {found}, expected {wanted}")
        if self.use_bias != (bias is not None):
            raise UsageError(
                f"copy_params_from: the layer has {'a' if bias is not None else 'no'} bias and TiledLinear was built "
                f"with bias={self.use_bias}; build it with bias={bias is not None}"
            )
        return other.weight.detach(), None if bias is None else bias.detach()


class TiledLinearReturnBias(TiledLinear):
    """Of layers that return (output, bias) without adding the bias, as Megatron's do; returns the same pair.

    Without `combine_out_splits` it is a list of such pairs.
    """

    def _row(self, row: Any, inputs: Sequence[Tensor]) -> Any:
        total: Tensor | None = None
        last: Tensor | None = None
        for tile, part in zip(row, inputs, strict=True):
            returned = tile(part)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise UsageError(
                    f"TiledLinearReturnBias takes a linear_cls that returns (output, bias), and {type(tile).__name__} "
                    f"returned {type(returned).__name__}; use TiledLinear"
                )
            product, bias = returned
            total = product if total is None else total + product
            last = bias if bias is not None else last
        return total, last

    def _combined(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._combined([output for output, _ in outputs]), super()._combined(biases) if biases else None


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: int | Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Views of the sizes `partitions` along the last dim (copies where `contiguous_split_chunks` needs them)."""
    sizes = partitions if isinstance(partitions, int) else list(partitions)
    parts: tuple[Tensor, ...] = tensor.split(sizes, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def _bounds(side: str, features: int, splits: int) -> list[int]:
    """Where the parts of a side begin, and the end of the last."""
    if not 1 <= splits <= features:
        raise UsageError(f"TiledLinear: {side}_splits is {splits}; it must be from 1 to {side}_features = {features}")
    size, longer = divmod(features, splits)
    return [part * size + min(part, longer) for part in range(splits + 1)]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
