"""Rows of numbers to codes and scales, back, and to their sum: the references, and the kernels where they can.

Ops `codec_encode`, `codec_sum`, `codec_signs`, `codec_signed`. A block's scale is its largest magnitude
over the largest number of the format; codes are those of the number times the inverse of the scale. A block with a
number that is not finite has a scale that is not, so all of it decodes to numbers that are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.capability import has_e4m3
from deepspeed.ops.codecs.formats import FORMATS, Format, Place, pack, unpack
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

SMALLEST = 2.0**-126
"""Scales below it are zero: their inverse would not be finite."""

_SIGNS = 4096
"""Elements of a block of sign bits; see [Note: planes]."""


def encode(
    form: str,
    block: int,
    places: tuple[Place, ...],
    values: Tensor,
    payload: Tensor,
    scales: Tensor,
    seed: int | None = None,
) -> None:
    """Write parts of `[rows, n]` numbers as codes `[rows, bytes]` and scales; a `seed` rounds at random."""
    op("codec_encode")(form, block, places, values, payload, scales, seed)


def decode_sum(form: str, block: int, places: tuple[Place, ...], payload: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the sums over the rows of `[rows, sums, bytes]`, added in float32 in their order, to `out`, `[sums, n]`.

    In its dtype; what lies between parts stays.
    """
    op("codec_sum")(form, block, places, payload, scales, out)


@reference("codec_encode")
@torch.no_grad()
def encode_reference(
    form: str,
    block: int,
    places: tuple[Place, ...],
    values: Tensor,
    payload: Tensor,
    scales: Tensor,
    seed: int | None = None,
) -> None:
    for place in places:
        for at, (part, codes, scale) in enumerate(_parts(FORMATS[form], block, place, values, payload, scales)):
            noise = None if seed is None else dither(part, seed, at * values.shape[1])
            _encode(FORMATS[form], part, codes, scale, noise)


@reference("codec_sum")
@torch.no_grad()
def sum_reference(
    form: str, block: int, places: tuple[Place, ...], payload: Tensor, scales: Tensor, out: Tensor
) -> None:
    for place in places:
        rows = [_parts(FORMATS[form], block, place, out, *row) for row in zip(payload, scales, strict=True)]
        for first, *others in zip(*rows, strict=True):
            part, total = first[0], _values(FORMATS[form], *first)
            for each in others:
                total.add_(_values(FORMATS[form], *each))
            part.copy_(total)


def _parts(
    form: Format, block: int, place: Place, values: Tensor, payload: Tensor, scales: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(numbers [rows, blocks, L], bytes [rows, blocks, planes, Q], scales [rows, blocks, 1]): whole, then short."""
    start, numel, code, at = place
    values, scales = values.narrow(1, start, numel), scales.narrow(1, at, -(-numel // block))
    parts, whole = [], numel // block
    for length, begin, stop in ((block, 0, whole * block), (numel % block, whole * block, numel)):
        if begin == stop or not len(values):
            continue
        blocks, group = (stop - begin) // length, -(-length // form.lanes)
        codes = payload.narrow(1, code, blocks * form.planes * group).unflatten(1, (blocks, form.planes, group))
        first = begin // block
        numbers = values[:, begin:stop].unflatten(1, (blocks, length))
        parts.append((numbers, codes, scales[:, first : first + blocks, None]))
        code += blocks * form.planes * group
    return parts


def _scale_of(form: Format, part: Tensor) -> Tensor:
    """The scales of blocks, `[..., 1]`; found among the bits, where a NaN is larger than anything.

    By a product: devices differ in how they divide a tensor by a number.
    """
    top = (part.float().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True).view(torch.float32)
    scale = top * form.inverse
    return torch.where(scale < SMALLEST, 0.0, scale)


def _encode(form: Format, part: Tensor, codes: Tensor, scale: Tensor, noise: Tensor | None) -> None:
    wide = part.float()
    made = _scale_of(form, part)
    scale.copy_(made)
    scaled = wide * torch.where(made > 0, 1.0 / made, 0.0)
    if noise is not None:
        scaled = torch.floor(scaled + noise)
    lanes, group = form.lanes, codes.shape[-1]
    if lanes == 1:
        codes.copy_(form.codes(scaled).unsqueeze(-2))
        return
    short = lanes * group - scaled.shape[-1]
    if short:
        scaled = torch.nn.functional.pad(scaled, (0, short))
    codes.copy_(pack(form.codes(scaled).unflatten(-1, (lanes, group)), form.bits))


def _values(form: Format, part: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 numbers that codes of a part mean."""
    if form.lanes == 1:
        return form.values(codes.squeeze(-2).contiguous()) * scale
    return form.values(unpack(codes, form.bits).flatten(-2)[..., : part.shape[-1]]) * scale


def dither(part: Tensor, seed: int, start: int) -> Tensor:
    """Numbers of [0, 1), by a hash of each element's place."""
    word = torch.arange(start, start + part.numel(), device=part.device).mul_(0x9E3779B1).add_(seed * 0x85EBCA77)
    word = ((word & 0xFFFFFFFF) ^ (word >> 15 & 0x1FFFF)) * 0x7FEB352D & 0xFFFFFFFF
    return ((word >> 8).float() * 2.0**-24).view(part.shape)


def _takes(block: int, values: Tensor, payload: Tensor, scales: Tensor, form: str | None = None) -> bool:
    """Whether the kernels can read and write these."""
    if form is not None and FORMATS[form].dtype is torch.float8_e4m3fn and values.is_cuda and not has_e4m3.holds:
        return False
    even = 32 <= block <= 8192 and block & (block - 1) == 0
    lines = all(each.stride(-1) == 1 for each in (values, payload, scales)) and values.numel() > 0
    return even and lines and takes(values)


@by_triton("codec_encode")
@torch.no_grad()
def encode_triton(
    form: str,
    block: int,
    places: tuple[Place, ...],
    values: Tensor,
    payload: Tensor,
    scales: Tensor,
    seed: int | None = None,
) -> None:
    if seed is not None or not _takes(block, values, payload, scales, form):
        encode_reference(form, block, places, values, payload, scales, seed)
        return
    from deepspeed.ops.codecs.kernels import rows as kernels

    kernels.encode(FORMATS[form], block, places, values, payload, scales, SMALLEST)


@by_triton("codec_sum")
@torch.no_grad()
def sum_triton(form: str, block: int, places: tuple[Place, ...], payload: Tensor, scales: Tensor, out: Tensor) -> None:
    if not _takes(block, out, payload, scales, form) or not len(payload):
        sum_reference(form, block, places, payload, scales, out)
        return
    from deepspeed.ops.codecs.kernels import rows as kernels

    kernels.decode_sum(FORMATS[form], block, places, payload, scales, out)


# ---- signs


def sign_bytes(numel: int) -> int:
    """Of the sign bits of a row of so many elements."""
    whole, rest = divmod(numel, _SIGNS)
    return whole * (_SIGNS // 8) + -(-rest // 8)


def signs(values: Tensor, payload: Tensor) -> Tensor:
    """Write a bit for each of `[rows, n]` numbers that is below zero to `[rows, bytes]`; returns norms, `[rows, 1]`."""
    norms: Tensor = op("codec_signs")(values, payload)
    return norms


def signed(payload: Tensor, scales: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write the scales `[rows, 1]` with these signs to `out`, `[rows, n]`; with `add` their sum, to `[n]`."""
    op("codec_signed")(payload, scales, out, add)


@reference("codec_signs")
@torch.no_grad()
def signs_reference(values: Tensor, payload: Tensor) -> Tensor:
    weights = 1 << torch.arange(8, device=values.device).view(8, 1)
    for part, bits in _sign_parts(values, payload):
        lanes = torch.nn.functional.pad((part < 0).to(torch.int64), (0, 8 * bits.shape[-1] - part.shape[-1]))
        bits.copy_((lanes.unflatten(-1, (8, -1)) * weights).sum(-2))
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True, dtype=torch.float32)
    return norms


@reference("codec_signed")
@torch.no_grad()
def signed_reference(payload: Tensor, scales: Tensor, out: Tensor, add: bool) -> None:
    if add:
        total = torch.zeros(1, len(out), dtype=torch.float32, device=out.device)
        for row in range(len(payload)):
            each = torch.empty_like(total)
            signed_reference(payload[row : row + 1], scales[row : row + 1], each, False)
            total.add_(each)
        out.copy_(total.view(-1))
        return
    shifts = torch.arange(8, device=payload.device, dtype=torch.uint8).view(8, 1)
    for part, bits in _sign_parts(out, payload):
        below = ((bits.unsqueeze(-2) >> shifts) & 1).flatten(-2)[..., : part.shape[-1]].bool()
        scale = scales.unsqueeze(-1)
        part.copy_(torch.where(below, -scale, scale))


def _sign_parts(values: Tensor, payload: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(numbers `[rows, blocks, L]`, bytes `[rows, blocks, Q]`): whole blocks, then the short one."""
    numel = values.shape[1]
    whole, rest = divmod(numel, _SIGNS)
    split, parts = whole * (_SIGNS // 8), []
    if whole:
        numbers = values[:, : whole * _SIGNS].unflatten(1, (whole, _SIGNS))
        parts.append((numbers, payload[:, :split].unflatten(1, (whole, _SIGNS // 8))))
    if rest:
        numbers = values[:, whole * _SIGNS :].unflatten(1, (1, rest))
        parts.append((numbers, payload[:, split : split + -(-rest // 8)].unflatten(1, (1, -1))))
    return parts


@by_triton("codec_signs")
@torch.no_grad()
def signs_triton(values: Tensor, payload: Tensor) -> Tensor:
    if not _takes(_SIGNS, values, payload, payload):
        return signs_reference(values, payload)
    from deepspeed.ops.codecs.kernels import rows as kernels

    return kernels.signs(values, payload, _SIGNS)


@by_triton("codec_signed")
@torch.no_grad()
def signed_triton(payload: Tensor, scales: Tensor, out: Tensor, add: bool) -> None:
    if not _takes(_SIGNS, out, payload, scales) or not len(payload):
        signed_reference(payload, scales, out, add)
        return
    from deepspeed.ops.codecs.kernels import rows as kernels

    kernels.signed(payload, scales, out, _SIGNS, add=add)
