"""Weights that rest as integers of 8, 4, 2 or 1 bits, each row or part of a row with a scale.

A weight is (codes - zero) * scale, in float32. Codes of fewer than 8 bits share bytes as codecs pack them: a flat row
of codes is cut into as many lanes as codes share a byte, and byte i has code i of every lane.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.ops.codecs.formats import pack, unpack
from deepspeed.ops.quantizer.quantizer import GroupCodes
from deepspeed.transformers.replacement import class_before

__all__ = ["StoredWeight", "WeightGrid", "require_rows", "store"]


_KEY = "compression_training.weight_quantization.shared_parameters.store_integers"


def require_rows(rows: int, width: int, groups: int, name: str) -> None:
    """Refuse groups of a weight `[rows, width]` that neither divide rows nor are made of them."""
    size = rows * width // groups
    if size % width and width % size:
        raise UsageError(
            f"{_KEY}: groups of {size} elements do not fit into rows of {width} of {name}; use as many quantize_groups "
            f"as divide {rows}, or a multiple of that"
        )


class WeightGrid:
    """The numbers that a rounded weight `[rows, ...]` may have: multiples of a scale, from a least one on."""

    def __init__(self, weight: Tensor, found: GroupCodes, bits: int) -> None:
        self.bits = bits
        scale, zero = found.scale, torch.full_like(found.scale, 2.0 ** (bits - 1))
        if bits == 1:  # signs: codes 0 and 1, two magnitudes apart
            scale, zero = 2 * scale, zero / 2
        elif bool(found.offset.any()):
            zero = -(found.offset / scale).round()
        self.scale, self.zero = self._by_row(scale, weight, found), self._by_row(zero, weight, found)

    @staticmethod
    def _by_row(fact: Tensor, weight: Tensor, found: GroupCodes) -> Tensor:
        """`[rows, parts of a row]`."""
        rows, width, size = len(weight), weight[0].numel(), found.codes.shape[1]
        return fact.view(rows, -1) if size < width else fact.repeat_interleave(size // width, 0)

    def take(self, index: Tensor, dim: int, name: str) -> None:
        """Follow a weight that loses rows or columns."""
        if dim == 0:
            self.scale, self.zero = self.scale[index], self.zero[index]
        elif self.scale.shape[1] > 1:
            raise UsageError(
                f"{_KEY}: {name} loses inputs, and "
                f"{self.scale.shape[1]} groups share each of its rows; use at most one group for each row"
            )

    def codes(self, weight: Tensor) -> Tensor:
        """`[rows, width]` codes of a weight of such numbers."""
        rows, parts = self.scale.shape
        blocks = weight.detach().float().reshape(rows, parts, -1)
        found = (blocks / self.scale.unsqueeze(-1) + self.zero.unsqueeze(-1)).round()
        top = 2**self.bits - 1
        if bool((found < 0).any()) or bool((found > top).any()):
            raise UsageError(
                f"{_KEY}: a pruned weight is zero, which is none of the numbers of its group; use quantization_type "
                "symmetric and more than 1 bit"
            )
        return found.view(rows, -1).to(torch.int32)


class StoredWeight(nn.Module):
    """A layer whose weight rests as integers; it is widened for each forward."""

    weight_codes: Tensor
    weight_scale: Tensor
    weight_zero: Tensor
    stored_shape: torch.Size
    stored_bits: int
    stored_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight, widened to the dtype that it had."""
        codes, bits = self.weight_codes, self.stored_bits
        if bits < 8:
            codes = unpack(codes.unsqueeze(0), bits).flatten()[: self.stored_shape.numel()]
        blocks = codes.view(*self.weight_scale.shape, -1).float()
        found = (blocks - self.weight_zero.unsqueeze(-1)) * self.weight_scale.unsqueeze(-1)
        return found.view(self.stored_shape).to(self.stored_dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredWeight:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stored_dtype = fn(torch.empty(0, dtype=self.stored_dtype, device=self.weight_codes.device)).dtype
        self.weight_scale, self.weight_zero = self.weight_scale.float(), self.weight_zero.float()
        return self


@torch.no_grad()
def store(module: nn.Module, grid: WeightGrid) -> None:
    """Let a plain layer keep its weight as integers."""
    weight = module._parameters.pop("weight")
    assert weight is not None, "the layer has a weight"
    codes = grid.codes(weight)
    if grid.bits < 8:
        lanes = 8 // grid.bits
        flat = codes.flatten()
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % lanes))
        packed = pack(flat.view(lanes, -1), grid.bits).flatten()
    else:
        packed = codes.to(torch.uint8)
    module.__class__ = class_before(StoredWeight, type(module), "Stored")
    vars(module).update(stored_shape=weight.shape, stored_bits=grid.bits, stored_dtype=weight.dtype)
    for name, value in (("codes", packed), ("scale", grid.scale), ("zero", grid.zero)):
        module.register_buffer(f"weight_{name}", value)
