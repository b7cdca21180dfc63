"""Groups of numbers as integers of few bits: rounded in place, or as packed codes with scales and back.

What `QuantizerBuilder().load()` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["GroupCodes", "Reduce", "ds_quantizer", "in_steps", "round_groups"]


class QuantizationType(Enum):
    """Whether codes span around zero or from the least number to the largest."""

    Symmetric = 0
    Asymmetric = 1


Symmetric, Asymmetric = QuantizationType.Symmetric, QuantizationType.Asymmetric


@torch.no_grad()
def ds_quantizer(input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False) -> Tensor:
    """Round `input` in place to `bit_num` bits with a scale for each of `groups`; returns it.

    `sr` rounds up or down at random, such that the mean is right; `asym` spans from the least number to the largest.
    """
    _check("ds_quantizer", input, groups, bit_num, range(2, 17))
    if not input.numel():
        return input
    return input.copy_(_codes(input, groups, bit_num, sr=sr, asym=asym).values.view(input.shape))


ds_quantize_fp32 = ds_quantize_fp16 = partial(ds_quantizer, sr=False, asym=False)
ds_sr_quantize_fp32 = ds_sr_quantize_fp16 = partial(ds_quantizer, sr=True, asym=False)
ds_quantize_asym_fp32 = ds_quantize_asym_fp16 = partial(ds_quantizer, sr=False, asym=True)
ds_sr_quantize_asym_fp32 = ds_sr_quantize_asym_fp16 = partial(ds_quantizer, sr=True, asym=True)


@torch.no_grad()
def quantize(input_vals: Tensor, groups: int, num_bits: int, quant_type: QuantizationType) -> tuple[Tensor, Tensor]:
    """(int8 codes, two to a byte with 4 bits, the first in the low half; float32 scales, or scales and offsets)."""
    _check("quantize", input_vals, groups, num_bits, (4, 8))
    if num_bits == 4 and input_vals.numel() % 2:
        raise UsageError(f"quantize: codes of 4 bits share bytes in pairs; found an odd number, {input_vals.numel()}")
    asym = quant_type is Asymmetric
    made = _codes(input_vals, groups, num_bits, sr=False, asym=asym)
    codes, scale, low = made.codes, made.scale, made.offset
    if asym:  # what is stored is signed
        codes, low = codes - 2 ** (num_bits - 1), low + 2 ** (num_bits - 1) * scale
    flat = codes.reshape(-1).to(torch.int8)
    shape = input_vals.shape
    if num_bits == 4:
        flat = (flat[0::2] & 15) | (flat[1::2] << 4)
        shape = torch.Size((*shape[:-1], shape[-1] // 2)) if shape[-1] % 2 == 0 else flat.shape
    return flat.view(shape), torch.cat([scale, low], 1) if asym else scale


@torch.no_grad()
def dequantize_fp32(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """The float32 numbers of codes that `quantize` made."""
    _check("dequantize", quantized_data, groups, num_bits, (4, 8))
    codes, shape = quantized_data.reshape(-1), quantized_data.shape
    if num_bits == 4:
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], 1).view(-1)  # shifts of int8 keep the sign
        shape = torch.Size((*shape[:-1], shape[-1] * 2))
    wide = codes.view(groups, -1) * params[:, :1]
    return (wide + params[:, 1:] if quant_type is Asymmetric else wide).view(shape)


def dequantize(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """As `dequantize_fp32`, in float16."""
    return dequantize_fp32(quantized_data, params, groups, num_bits, quant_type).half()


def swizzle_quant(
    input_vals: Tensor,
    groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> tuple[Tensor, Tensor]:
    """As `quantize`, of chunks for the devices of nodes, brought from the order of nodes to that of places in them.

    Each of `pipeline_size` parts by itself.
    """
    return quantize(_swizzled(input_vals, pipeline_size, nodes, devices_per_node), groups, num_bits, quant_type)


def loco_swizzle_quant(
    input_vals: Tensor,
    error_feedback: Tensor,
    err_beta: float,
    groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> tuple[Tensor, Tensor]:
    """As `swizzle_quant` of the sum with what was lost before; `error_feedback`, as swizzled, follows in place."""
    wide = _swizzled(input_vals, pipeline_size, nodes, devices_per_node).float()
    return _fed_back(wide, error_feedback, err_beta, groups, num_bits, quant_type)


def quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    devices_per_node: int,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the mean of equal parts of `input_vals`, one from each device of a node."""
    wide = dequantize_fp32(input_vals.view(devices_per_node, -1), input_scales, in_groups, num_bits, quant_type)
    return quantize(wide.mean(0), out_groups, num_bits, quant_type)


def loco_quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    error_feedback: Tensor,
    err_beta: float,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    devices_per_node: int,
) -> tuple[Tensor, Tensor]:
    """As `quantized_reduction` of the sum with what was lost before; `error_feedback` follows in place."""
    wide = dequantize_fp32(input_vals.view(devices_per_node, -1), input_scales, in_groups, num_bits, quant_type)
    return _fed_back(wide.mean(0), error_feedback, err_beta, out_groups, num_bits, quant_type)


def _swizzled(values: Tensor, parts: int, nodes: int, devices: int) -> Tensor:
    if values.numel() % (parts * nodes * devices):
        raise UsageError(
            f"swizzle_quant: {values.numel()} elements are not equal chunks for pipeline_size {parts} times nodes "
            f"{nodes} times devices_per_node {devices}"
        )
    return values.reshape(parts, nodes, devices, -1).transpose(1, 2).reshape(-1)


@torch.no_grad()
def _fed_back(
    wide: Tensor, error: Tensor, beta: float, groups: int, bits: int, quant_type: QuantizationType
) -> tuple[Tensor, Tensor]:
    wide = wide + error.view(-1)
    codes, params = quantize(wide, groups, bits, quant_type)
    lost = wide - dequantize_fp32(codes, params, groups, bits, quant_type)
    error.copy_((beta * error.view(-1) + (1 - beta) * lost).view(error.shape))
    return codes, params


class CUDAQuantizer:
    """Weights in 8 bits with a scale for at most `target_group_size` neighbours, on any device."""

    target_group_size = 8000

    def quantize(self, param: Tensor, groups: int | None = None) -> tuple[Tensor, Tensor]:
        """(codes, scales); by default in as few groups as divide the elements."""
        if groups is None:
            least = max(1, -(-param.numel() // self.target_group_size))
            groups = next(count for count in range(least, param.numel() + least + 1) if param.numel() % count == 0)
        return quantize(param, groups, 8, Symmetric)

    def dequantize(self, quantized_param: Tensor, scale: Tensor) -> Tensor:
        """The numbers in float16."""
        return dequantize(quantized_param, scale, len(scale), 8, Symmetric)


def _codes(values: Tensor, groups: int, bits: int, *, sr: bool, asym: bool) -> GroupCodes:
    """Codes of groups, whose ends are the largest magnitude, or the least number and the largest."""
    wide = values.float().reshape(groups, -1)
    low = wide.amin(1, keepdim=True) if asym else torch.zeros_like(wide[:, :1])
    span = wide.amax(1, keepdim=True) - low if asym else wide.abs().amax(1, keepdim=True)
    steps = 2**bits - 1 if asym else 2 ** (bits - 1) - 1
    scale = torch.where(span > 0, span / steps, 1.0)
    return _coded(wide, scale, low, (0 if asym else -steps, steps), torch.rand_like(wide) if sr else None)


def _check(name: str, values: Tensor, groups: int, bits: int, allowed: range | tuple[int, ...]) -> None:
    if groups < 1 or values.numel() % groups:
        raise UsageError(
            f"{name}: {groups} groups do not divide the {values.numel()} elements of the tensor; use a divisor"
        )
    if bits not in allowed:
        expected = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(str, allowed))
        raise UsageError(f"{name}: bit_num is {bits}; expected {expected}")


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
