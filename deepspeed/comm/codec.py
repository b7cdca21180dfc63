"""`Codec`: flat tensors as fewer bytes. What a codec makes of a row is one message: its scales, then its payload.

Sizes are known from the number of elements alone, so that a rank knows what comes from others. Any number is fine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepspeed.ops.codecs import rows as numbers
from deepspeed.ops.codecs.formats import FORMATS, Place

Parts = tuple[tuple[int, int], ...]
"""(where it begins in a row, how many numbers) of each."""
Sections = tuple[tuple[int, int], ...]
"""(where it begins in a message, how many bytes each block has there) of scales, payload and what else there is."""
_ALIGNED = 16  # bytes at which the parts of a message begin, so that kernels read them in wide words


class Codec(Protocol):
    """Encodes rows of numbers into messages of bytes."""

    @property
    def name(self) -> str:
        """What logs call it."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the message."""

    def encode(self, values: Tensor, message: Tensor | None = None) -> Tensor:
        """Messages `[..., nbytes]` of numbers `[..., n]` of any float dtype; written to `message`, if that is given."""

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        """Write what messages `[..., nbytes]` say to `out`, `[..., n]`, in its dtype."""

    def decode_sum(self, messages: Tensor, out: Tensor) -> Tensor:
        """Write the sum of the rows `[rows, nbytes]`, added in float32 in their order, to `out`, `[n]`."""


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class BlockCodec:
    """Numbers of a format with a scale for each block of elements; a block's error is bounded by its scale."""

    form: str
    block: int
    """Elements that share a scale; a power of two."""

    @property
    def name(self) -> str:
        return self.form

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the codes of so many elements."""
        return FORMATS[self.form].payload_bytes(numel, self.block)

    def scales(self, numel: int) -> int:
        """How many float32 scales they have."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        return _aligned(4 * self.scales(numel), _ALIGNED) + _aligned(self.payload_bytes(numel), _ALIGNED)

    def parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """(payload, scales) of messages `[..., nbytes]`: views, uint8 and float32."""
        count = self.scales(numel)
        start = _aligned(4 * count, _ALIGNED)
        payload = message[..., start : start + self.payload_bytes(numel)]
        return payload, message[..., : 4 * count].view(torch.float32)

    def sections(self, numel: int) -> Sections:
        """Of a message of whole blocks."""
        return (0, 4), (_aligned(4 * self.scales(numel), _ALIGNED), self.payload_bytes(self.block))

    def encode(self, values: Tensor, message: Tensor | None = None, seed: int | None = None) -> Tensor:
        """See `Codec`; with a `seed` rounded up or down with the odds that make the mean right."""
        if message is None:
            message = values.new_empty(*values.shape[:-1], self.nbytes(values.shape[-1]), dtype=torch.uint8)
        self.encode_parts(((0, values.shape[-1]),), _rows(values), _rows(message), seed)
        return message

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        self.sum_parts(((0, out.shape[-1]),), _rows(message).unsqueeze(0), _rows(out))
        return out

    def decode_sum(self, messages: Tensor, out: Tensor) -> Tensor:
        """See `Codec`; of `[rows, sums, nbytes]` many sums to `[sums, n]`."""
        several = messages if messages.dim() == 3 else messages.unsqueeze(1)
        self.sum_parts(((0, out.shape[-1]),), several, _rows(out))
        return out

    def encode_parts(self, parts: Parts, values: Tensor, message: Tensor, seed: int | None = None) -> None:
        """As `encode` of each part of rows `[rows, n]`, with messages side by side in `[rows, bytes]`."""
        if places := self.places(parts):
            numbers.encode(self.form, self.block, places, values, message, message.view(torch.float32), seed)

    def sum_parts(self, parts: Parts, messages: Tensor, out: Tensor) -> None:
        """As `decode_sum` of each part, of `[rows, sums, bytes]` to `[sums, n]`; what lies between parts stays."""
        if places := self.places(parts):
            numbers.decode_sum(self.form, self.block, places, messages, messages.view(torch.float32), out)

    @lru_cache(512)  # noqa: B019 - codecs are few
    def parts_bytes(self, parts: Parts) -> int:
        """Bytes of the messages of parts."""
        return sum(self.nbytes(length) for _, length in parts)

    @lru_cache(512)  # noqa: B019 - codecs are few
    def places(self, parts: Parts) -> tuple[Place, ...]:
        """Where the codes of parts lie in their message, in bytes, and their scales, in numbers."""
        found, at = [], 0
        for start, length in parts:
            found.append((start, length, at + _aligned(4 * self.scales(length), _ALIGNED), at // 4))
            at += self.nbytes(length)
        return tuple(found)


@dataclass(frozen=True)
class RangeCodec:
    """A block codec of what elements differ by from the middle of their block's range, which is kept as a float32."""

    inner: BlockCodec

    @property
    def name(self) -> str:
        return f"{self.inner.name} range"

    @property
    def block(self) -> int:
        """Elements that share a scale and a middle."""
        return self.inner.block

    def nbytes(self, numel: int) -> int:
        return self._begin(numel) + self.inner.nbytes(numel)

    def parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """As of the block codec."""
        return self.inner.parts(message[..., self._begin(numel) :], numel)

    def sections(self, numel: int) -> Sections:
        """As of the block codec, with the middles before them."""
        return (0, 4), *((self._begin(numel) + start, size) for start, size in self.inner.sections(numel))

    def encode(self, values: Tensor, message: Tensor | None = None) -> Tensor:
        numel = values.shape[-1]
        if message is None:
            message = values.new_empty(*values.shape[:-1], self.nbytes(numel), dtype=torch.uint8)
        rows, wide = _rows(message), _rows(values).float()
        padded = pad(wide.unsqueeze(0), (0, -numel % self.block), mode="replicate").squeeze(0)
        blocks = padded.unflatten(1, (-1, self.block))
        middles = (blocks.amin(-1) + blocks.amax(-1)) / 2
        self.middles(rows, numel).copy_(middles)
        self.inner.encode(wide - self._spread(middles, numel), rows[:, self._begin(numel) :])
        return message

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        rows, numel = _rows(message), out.shape[-1]
        wide = out.new_empty(len(rows), numel, dtype=torch.float32)
        self.inner.decode(rows[:, self._begin(numel) :], wide)
        return out.copy_(wide.add_(self._spread(self.middles(rows, numel), numel)).view(out.shape))

    def decode_sum(self, messages: Tensor, out: Tensor) -> Tensor:
        numel = out.shape[-1]
        self.inner.decode_sum(messages[:, self._begin(numel) :], total := out.float())
        return out.copy_(total.add_(self._spread(self.middles(messages, numel).sum(0, keepdim=True), numel)[0]))

    def _begin(self, numel: int) -> int:
        """Where the message of the block codec begins."""
        return _aligned(4 * self.inner.scales(numel), _ALIGNED)

    def middles(self, message: Tensor, numel: int) -> Tensor:
        """The middles of messages `[..., nbytes]`: a view, float32."""
        return message[..., : 4 * self.inner.scales(numel)].view(torch.float32)

    def _spread(self, middles: Tensor, numel: int) -> Tensor:
        return middles.repeat_interleave(self.block, -1)[:, :numel]


@dataclass(frozen=True)
class SignCodec:
    """Signs with one scale, the root of the mean square (‖x‖₂ / √n); the sign of zero is plus."""

    name: str = "sign"

    def nbytes(self, numel: int) -> int:
        return 4 + _aligned(numbers.sign_bytes(numel), 4)

    def parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """(signs, scale) of messages `[..., nbytes]`: views, uint8 and float32."""
        return message[..., 4 : 4 + numbers.sign_bytes(numel)], message[..., :4].view(torch.float32)

    def encode(self, values: Tensor, message: Tensor | None = None) -> Tensor:
        numel = values.shape[-1]
        if message is None:
            message = values.new_empty(*values.shape[:-1], self.nbytes(numel), dtype=torch.uint8)
        flat = _rows(values)
        payload, scales = self.parts(_rows(message), numel)
        scales.copy_(numbers.signs(flat, payload) / max(numel, 1) ** 0.5)
        return message

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        numbers.signed(*self.parts(_rows(message), out.shape[-1]), _rows(out))
        return out

    def decode_sum(self, messages: Tensor, out: Tensor) -> Tensor:
        numbers.signed(*self.parts(messages, len(out)), out, add=True)
        return out


def _rows(tensor: Tensor) -> Tensor:
    """`[rows, n]` of `[..., n]`: a view."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor


BLOCKS = {"int8": 256, "int4": 512, "fp8_e4m3": 256, "fp8_e5m2": 256, "fp4": 512, "fp6": 512, "fp12": 256}
"""Elements that share a scale, such that scales are at most 2 % of a message."""

SIGN = SignCodec()


def block_codec(form: str, block: int | None = None) -> BlockCodec:
    """The codec of a format, with its usual blocks if none is given."""
    return BlockCodec(form, BLOCKS[form] if block is None else block)


def group_codec(bits: int, group: int, *, symmetric: bool) -> BlockCodec | RangeCodec:
    """Integers of so many bits; groups have a scale, and unless they are symmetric the middle of their range."""
    inner = BlockCodec(f"int{bits}", group)
    return inner if symmetric else RangeCodec(inner)


def codec_of(name: str) -> Codec:
    """The codec of this name: a format with its usual blocks, or signs."""
    return SIGN if name == SIGN.name else block_codec(name)
