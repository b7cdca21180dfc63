"""Flat tensors that exist in a file only: their parts are written from where they lie.

[Note: stand-ins] torch.save writes a tensor's memory as it is, so that a flat tensor would have to be made first, which
costs as much memory and time as the file. Instead the object holds a stand-in: memory of the right size that is never
touched, and so never exists. torch.save hands this memory to the stream as it finds it, and the stream, which knows it
by its address, takes the bytes of the parts. Should a version of torch hand over copies instead, `works` finds out and
flat tensors are made; that all bytes of all stand-ins were replaced is checked after every file.
"""

from __future__ import annotations

import bisect
import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.storage.durable import Sink, dump
from deepspeed.checkpoint.storage.tensor_memory import tensors_in
from deepspeed.errors import CheckpointError
from deepspeed.ops.host_memory import bytes_of

LEAST = 2**20
"""Bytes of the smallest tensor that is worth a stand-in."""
_STEP = 16 * 2**20  # bytes that come from a device at a time


@dataclass(frozen=True, slots=True)
class _StandIn:
    tensor: Tensor
    parts: Sequence[tuple[int, Tensor]]
    """(position, flat tensor of the same dtype), by position."""

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def stop(self) -> int:
        return self.address + self.tensor.nbytes

    def bytes_between(self, low: int, high: int) -> Iterator[memoryview]:
        """The bytes [low, high) of the tensor that this stands for."""
        width = self.tensor.element_size()
        reached = low
        for position, part in self.parts:
            start, stop = position * width, (position + part.numel()) * width
            if stop <= reached or start >= high:
                continue
            yield from _zeros(start - reached)
            first, last = max(start, reached), min(stop, high)
            yield from _host_bytes(part, first - start, last - start)
            reached = last
        yield from _zeros(high - reached)


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        portion = memoryview(bytes(min(count, _STEP)))
        yield portion
        count -= len(portion)


def _host_bytes(part: Tensor, low: int, high: int) -> Iterator[memoryview]:
    """The bytes [low, high) of a flat tensor, from wherever it lies."""
    if part.device.type == "cpu" and part.is_contiguous():
        yield bytes_of(part)[low:high]
        return
    width = part.element_size()
    for start in range(low // width, -(-high // width), _STEP // width):
        stop = min(start + _STEP // width, -(-high // width))
        host = part[start:stop].cpu().contiguous()  # lives on until the bytes have been written
        yield bytes_of(host)[max(low - start * width, 0) : high - start * width]


class StandIns:
    """Makes stand-ins for the files of one save, and writes the files."""

    def __init__(self) -> None:
        self._made: list[_StandIn] = []

    @staticmethod
    @functools.cache
    def works() -> bool:
        """Whether this torch hands over memory as it is, tried with a small tensor."""
        stand_ins, values = StandIns(), torch.arange(LEAST // 8, dtype=torch.float64)
        stand_in = stand_ins.flat([(0, values)], values.numel(), values.dtype)
        file = io.BytesIO()
        try:
            stand_ins.dump({"values": stand_in}, file)
        except CheckpointError:
            return False
        file.seek(0)
        return torch.equal(torch.load(file, weights_only=True)["values"], values)

    def flat(self, parts: Iterable[tuple[int, Tensor]], numel: int, dtype: torch.dtype) -> Tensor:
        """A stand-in for `numel` elements with each part at its position, zero elsewhere."""
        memory = torch.empty(numel, dtype=dtype)
        self._made.append(_StandIn(memory, sorted(parts, key=lambda item: item[0])))
        return memory

    def dump(self, obj: Any, sink: Sink) -> None:
        """torch.save of an object that may hold stand-ins."""
        storages = {tensor.data_ptr() for tensor in tensors_in(obj) if tensor.layout is torch.strided}
        inside = sorted((made for made in self._made if made.address in storages), key=lambda made: made.address)
        replacing = _ReplacingSink(sink, inside)
        dump(obj, replacing)
        wanted = sum(made.tensor.nbytes for made in inside)
        if replacing.replaced != wanted:
            raise CheckpointError(
                f"torch {torch.__version__} wrote {wanted - replacing.replaced} of {wanted} bytes of flat tensors in a "
                "way that is not known here; the file was not kept"
            )


class _ReplacingSink:
    """A sink that replaces stand-ins by what they stand for."""

    def __init__(self, sink: Sink, made: Sequence[_StandIn]) -> None:
        self._sink = sink
        self._made = made
        self._addresses = [each.address for each in made]
        self.replaced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        made, offset = self._find(view)
        if made is None:
            self._sink.write(view)
            return len(view)
        for portion in made.bytes_between(offset, offset + len(view)):
            self._sink.write(portion)
        self.replaced += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing waits here."""

    def tell(self) -> int:
        """As much as came."""
        return self._sink.tell()

    def _find(self, view: memoryview) -> tuple[_StandIn | None, int]:
        if not view or not self._made:
            return None, 0
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        place = bisect.bisect_right(self._addresses, address) - 1
        if place < 0 or address + len(view) > self._made[place].stop:
            return None, 0
        return self._made[place], address - self._made[place].address
