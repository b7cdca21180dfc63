"""Groups of numbers as whole numbers with a scale: what compressed layers compute with and keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GroupCodes", "Reduce", "in_steps", "round_groups"]

Reduce = Callable[[Tensor, Literal["max", "sum"]], Tensor]
"""What makes a fact about this rank's part of groups one about the whole groups."""

_TERNARY = 0.7
"""Of 2 bits: what is smaller than this share of the mean magnitude becomes zero."""


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """Groups `[groups, n]` as whole numbers, each times its group's `scale`, plus its `offset`, both `[groups, 1]`."""

    codes: Tensor
    """Whole numbers, in float32."""
    scale: Tensor
    offset: Tensor

    @property
    def values(self) -> Tensor:
        """The float32 numbers that they stand for."""
        return self.codes * self.scale + self.offset


def _alone(fact: Tensor, _: str) -> Tensor:
    return fact


def _coded(wide: Tensor, scale: Tensor, offset: Tensor, ends: tuple[int, int], noise: Tensor | None) -> GroupCodes:
    """Rounded to nearest, ties to even; with `noise` of [0, 1) up or down, such that the mean is right."""
    scaled = (wide - offset) / scale
    codes = scaled.round() if noise is None else torch.floor(scaled + noise)
    return GroupCodes(codes.clamp_(*ends), scale, offset)


@torch.no_grad()
def round_groups(
    groups: Tensor, bits: int, *, asym: bool = False, noise: Tensor | None = None, reduce: Reduce | None = None
) -> GroupCodes:
    """Codes of groups `[groups, n]`: 1 bit is the sign, 2 bits have a zero, more are even steps; see `in_steps`."""
    wide, reduce = groups.float(), reduce or _alone
    if bits <= 2:
        return _few(wide, bits, torch.zeros_like(wide[:, :1]), reduce)
    high = reduce(wide.amax(1, keepdim=True), "max")
    low = -reduce(-wide.amin(1, keepdim=True), "max")
    return in_steps(wide, bits, (low, high), asym=asym, noise=noise)


@torch.no_grad()
def in_steps(
    wide: Tensor, bits: int, span: tuple[Tensor, Tensor], *, asym: bool = False, noise: Tensor | None = None
) -> GroupCodes:
    """Codes of numbers of `span`, least and largest: 2 max|x| / 2^bits wide each, the codes around zero.

    With `asym` (max - min) / 2^bits, and the codes begin at the multiple of it that is next to the least number.
    """
    low, high = span
    if asym:
        scale = torch.where(high > low, (high - low) / 2**bits, 1.0)
        return _coded(wide, scale, (low / scale).round() * scale, (0, 2**bits - 1), noise)
    top, half = torch.maximum(low.abs(), high.abs()), 2 ** (bits - 1)
    return _coded(wide, torch.where(top > 0, top / half, 1.0), torch.zeros_like(top), (-half, half - 1), noise)


def _few(wide: Tensor, bits: int, zero: Tensor, reduce: Reduce) -> GroupCodes:
    """One bit: the sign times the mean magnitude. Two: zero, or the sign times the mean magnitude of what is not."""
    counts = reduce(torch.full_like(zero, wide.shape[1]), "sum")
    magnitude = wide.abs()
    mean = reduce(magnitude.sum(1, keepdim=True), "sum") / counts
    if bits == 1:
        return GroupCodes(torch.where(wide < 0, -1.0, 1.0), mean, zero)
    kept = magnitude > _TERNARY * mean
    many = reduce(kept.sum(1, keepdim=True).float(), "sum").clamp(min=1)
    scale = reduce((magnitude * kept).sum(1, keepdim=True), "sum") / many
    return GroupCodes(wide.sign() * kept, scale, zero)
