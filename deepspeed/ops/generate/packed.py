"""Linear layers whose weights lie in 4, 6 or 8 bits and are widened in registers: op `packed_linear`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.ops.fp8.linear import MULTIPLE
from deepspeed.ops.fp8.product import product
from deepspeed.ops.fp8.quantise import round_rows
from deepspeed.ops.generate.packed_weight import UNIT, PackedWeight
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["MODES", "pack", "packed_linear", "unpack"]

FEW_ROWS, MOST_ROWS = 8, 64
"""Rows up to which 8-bit floats are widened (more are rounded themselves), and up to which weights are streamed."""
E4M3 = torch.float8_e4m3fn

_BITS = {"w8a16": 8, "w4a16": 4, "wf6af16": 6}
MODES = (*_BITS, "fp8")

_SIX = torch.tensor([m / 16 if e == 0 else (4 + m) * 2.0 ** (e - 5) for e in range(8) for m in range(4)])
"""The magnitudes of 6-bit numbers by their code: 0 to 28."""


@torch.no_grad()
def pack(weight: Tensor, mode: str, group_size: int = 128, symmetric: bool = True) -> PackedWeight:
    """Round a weight [out, in]; groups are of consecutive columns of a row, `group_size` 0 takes whole rows."""
    if mode not in MODES:
        raise UsageError(f"quantization mode {mode!r}: expected one of {', '.join(MODES)}")
    if weight.dim() != 2:
        raise UsageError(f"a weight of shape {tuple(weight.shape)} cannot be packed: expected [out, in]")
    shape = (weight.shape[0], weight.shape[1])
    if mode == "fp8":
        rounded = round_rows(weight.contiguous(), E4M3)
        assert rounded.rows is not None, "rows are asked for"
        return PackedWeight(mode, rounded.rows, rounded.scale, None, shape, 0, True)
    if group_size < 0 or group_size % UNIT:
        raise UsageError(f"group_size={group_size}: expected a multiple of {UNIT}, or 0 for one scale in each row")
    padded = functional.pad(weight.float(), (0, -shape[1] % (group_size or UNIT)))
    groups = padded.view(shape[0], -1, group_size or padded.shape[1])
    codes, scales, zeros = _six(groups) if mode == "wf6af16" else _integers(groups, _BITS[mode], symmetric)
    data = _joined(codes.view(shape[0], -1), _BITS[mode])
    return PackedWeight(mode, data, scales, zeros, shape, group_size, symmetric or mode == "wf6af16")


@torch.no_grad()
def unpack(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that the packed one stands for."""
    rows, columns = packed.shape
    if packed.mode == "fp8":
        return (packed.data.float() * packed.scales).to(dtype)
    codes = _separated(packed.data, _BITS[packed.mode])
    scales = packed.scales.float().unsqueeze(2)
    codes = codes.view(rows, scales.shape[1], -1)
    if packed.mode == "wf6af16":
        values = _SIX.to(codes.device)[(codes & 31).long()]
        values = torch.where(codes >= 32, -values, values)
    elif packed.zeros is None:
        values = codes.float() - 2 ** (_BITS[packed.mode] - 1)
    else:
        values = codes.float() - packed.zeros.unsqueeze(2).float()
    return (values * scales).view(rows, -1)[:, :columns].to(dtype).contiguous()


def _scaled(span: Tensor, steps: float) -> Tensor:
    """bfloat16 scales so that `steps` of them cover `span`; numbers are rounded by the scale that is kept."""
    return (span / steps).clamp(min=1e-30).to(torch.bfloat16)


def _integers(groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(uint8 codes, scales, zeros) of [rows, groups, columns]."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = _scaled(groups.abs().amax(2), middle - 1)
        codes = (groups / scales.float().unsqueeze(2)).round_().clamp_(1 - middle, middle - 1).add_(middle)
        return codes.to(torch.uint8), scales, None
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = _scaled(high - low, top)
    zeros = (-low / scales.float()).round_().clamp_(0, top)
    codes = (groups / scales.float().unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, top)
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8)


def _six(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    """(uint8 codes, scales, None) of [rows, groups, columns]: to the nearest number."""
    magnitudes = _SIX.to(groups.device)
    scales = _scaled(groups.abs().amax(2), float(magnitudes[-1]))
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    scaled = groups / scales.float().unsqueeze(2)
    codes = torch.bucketize(scaled.abs(), between, out_int32=True).to(torch.uint8)
    return codes | ((scaled < 0).to(torch.uint8) << 5), scales, None


def _joined(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, columns] in `bits` bits each."""
    if bits == 8:
        return codes
    rows = len(codes)
    if bits == 4:
        nibbles = codes.view(rows, -1, 4, 2, UNIT // 8)
        return (nibbles[:, :, :, 0] | (nibbles[:, :, :, 1] << 4)).transpose(2, 3).reshape(rows, -1)
    halves = (codes & 15).view(rows, -1, 2, UNIT // 2)
    low = halves[:, :, 0] | (halves[:, :, 1] << 4)
    pairs = (codes >> 4).view(rows, -1, 4, UNIT // 4)
    high = pairs[:, :, 0] | (pairs[:, :, 1] << 2) | (pairs[:, :, 2] << 4) | (pairs[:, :, 3] << 6)
    return torch.cat((low, high), 2).view(rows, -1)


def _separated(data: Tensor, bits: int) -> Tensor:
    """The codes that were joined."""
    if bits == 8:
        return data
    rows = len(data)
    if bits == 4:
        pairs = data.view(rows, -1, UNIT // 8, 4).transpose(2, 3)
        return torch.stack((pairs & 15, pairs >> 4), 3).view(rows, -1)
    units = data.view(rows, -1, UNIT * bits // 8)
    low, high = units[:, :, : UNIT // 2], units[:, :, UNIT // 2 :]
    codes = torch.cat((low & 15, low >> 4), 2)
    return (codes | torch.cat([(high >> 2 * quarter & 3) << 4 for quarter in range(4)], 2)).view(rows, -1)


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` of x [..., in] with a packed weight."""
    result: Tensor = op("packed_linear")(x, packed, bias)
    return result


@reference("packed_linear")
def packed_linear_reference(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """By a copy of the weight in x's dtype."""
    return functional.linear(x, unpack(packed, x.dtype), bias)


@by_triton("packed_linear")
@torch.no_grad()
def packed_linear_triton(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """By the kernels where they can; more than a few rows times an fp8 weight by products of 8-bit numbers."""
    rows = x.reshape(-1, x.shape[-1])
    sized = takes(x) and x.dtype != torch.float32 and rows.numel() > 0 and x.shape[-1] % MULTIPLE == 0
    if not sized:
        return packed_linear_reference(x, packed, bias)
    from deepspeed.ops.generate.kernels.packed import multiply

    if packed.mode != "fp8" or len(rows) <= FEW_ROWS:
        found = multiply(rows, packed, bias)
    else:
        rounded = round_rows(rows.contiguous(), E4M3)
        assert rounded.rows is not None, "rows are asked for"
        if len(rows) <= MOST_ROWS or packed.shape[0] % MULTIPLE:
            found = multiply(rounded.rows, packed, bias, x_scale=rounded.scale, dtype=x.dtype)
        else:
            found = product(rounded.rows, packed.data, (rounded.scale, packed.scales), x.dtype, fast=True)
            found = found if bias is None else found + bias
    return found.view(*x.shape[:-1], packed.shape[0])
