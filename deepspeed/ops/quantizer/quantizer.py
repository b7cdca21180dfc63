"""Groups of numbers rounded to integers of few bits and back, in place: what a quantised tensor would compute with."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["ds_quantizer"]


@torch.no_grad()
def ds_quantizer(input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False) -> Tensor:
    """Round `input` in place to `bit_num` bits with a scale for each of `groups`; returns it.

    `sr` rounds up or down at random, such that the mean is right; `asym` spans from the least number to the largest.
    """
    if groups < 1 or input.numel() % groups:
        raise UsageError(
            f"ds_quantizer: {groups} groups do not divide the {input.numel()} elements of the tensor; use a divisor"
        )
    if not 2 <= bit_num <= 16:
        raise UsageError(f"ds_quantizer: bit_num is {bit_num}; expected 2 to 16")
    if not input.numel():
        return input
    wide = input.float().reshape(groups, -1)
    low = wide.amin(1, keepdim=True) if asym else torch.zeros_like(wide[:, :1])
    span = wide.amax(1, keepdim=True) - low if asym else wide.abs().amax(1, keepdim=True)
    steps = 2**bit_num - 1 if asym else 2 ** (bit_num - 1) - 1
    scale = torch.where(span > 0, span / steps, 1.0)
    codes = (wide - low) / scale
    codes = torch.floor(codes + torch.rand_like(codes)) if sr else codes.round()
    codes = codes.clamp(0 if asym else -steps, steps)
    return input.copy_((codes * scale + low).view(input.shape))
