"""Reading torch files without running code from them: plain values, tensors and a few classes.

[Note: mapped files] `torch.load(mmap=True)` reads only the pickle; tensors are views of the mapped file whose bytes
come from the disk when they are touched. `CheckedFile` checks the pickle and the zip's directory before they are used,
and the blocks under a tensor when the tensor is required. Where a tensor lies in its file is told by the process's
memory map; on a system without one the whole file is checked instead. A reader that wants values in memory of its own
asks for their `place` and reads them from the file (`bulk_read`), since touching a map costs more.

[Note: hostile files] torch's safe unpickler runs no code, but it unpacks compressed members, makes byte arrays of any
length, and gives tensors that claim more elements than there are bytes. Files of torch.save do none of that. The answer
to each is to refuse the file, at a cost that does not grow with its tensors.

[Note: stand-ins] torch.save writes a tensor's memory as it is, so that a flat tensor would have to be made first, which
costs as much memory and time as the file. Instead the object holds a stand-in: memory of the right size that is never
touched, and so never exists. torch.save hands this memory to the stream as it finds it, and the stream, which knows it
by its address, takes the bytes of the parts. Should a version of torch hand over copies instead, `works` finds out and
flat tensors are made; that all bytes of all stand-ins were replaced is checked after every file.
"""

from __future__ import annotations

import argparse
import bisect
import datetime
import decimal
import functools
import io
import os
import pathlib
import pickle
import pickletools
import re
import struct
import threading
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.formats.guard import DAMAGE
from deepspeed.checkpoint.storage.block_reader import FileCheck
from deepspeed.checkpoint.storage.block_writer import FileFacts
from deepspeed.checkpoint.storage.durable import Sink, dump, explain, gibibytes, is_whole, tensors_in
from deepspeed.config.zero import ZeroStageEnum
from deepspeed.errors import CheckpointError
from deepspeed.ops.native import bytes_of
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.trust import open_regular

_END = b"PK\x05\x06"
_END_SIZE = 22
_SLACK = 64 * 2**20  # bytes that small tensors of small files may claim
_NODES = 100_000
_DEPTH = 200
_ATOMS = frozenset([str, int, float, bool, type(None), torch.dtype, torch.Size])


def check_members(file: IO[bytes], size: int) -> None:
    """A zip file whose members are stored as they are, each once, and whose directory ends it; else a ValueError."""
    file.seek(max(size - _END_SIZE, 0))
    if not file.read(4) == _END:
        raise ValueError("its zip directory is not at its end")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        odd = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size]
        if odd:
            raise ValueError(f"{odd[0]!r:.100} is compressed in it, which torch.save never does")
        if len({m.filename for m in members}) != len(members) or sum(m.file_size for m in members) > size:
            raise ValueError("its members overlap")
        pickles = [m for m in members if m.filename.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} members called data.pkl, expected 1")
    data = _stored(file, pickles[0])  # not by `archive`: we write no CRC-32, which it would compare
    if b"bytearray" in data or b"_codecs" in data:
        check_pickle(data)


def _stored(file: IO[bytes], member: zipfile.ZipInfo) -> bytes:
    file.seek(member.header_offset)
    head = file.read(30)
    file.seek(member.header_offset + 30 + sum(struct.unpack("<HH", head[26:])))
    return file.read(member.file_size)


def check_pickle(data: bytes | IO[bytes]) -> None:
    """Refuse a byte array that is made of a number, and text that is encoded in a way that takes long: a ValueError."""
    memo: dict[Any, object] = {}
    top: object = None
    waiting: list[str] = []  # what the next operations have to be
    for op, argument, _ in pickletools.genops(data):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = top
            continue
        top = memo.get(argument) if op.name in ("BINGET", "LONG_BINGET") else argument
        if op.name == "GLOBAL":
            top = _Global(str(argument))
        if waiting and not _fits(waiting.pop(0), op.name, top):
            raise ValueError("it calls a function in a way that torch.save never does")
        if top == _Global("__builtin__ bytearray") or top == _Global("builtins bytearray"):
            waiting = ["text or bytes"]
        elif top == _Global("_codecs encode"):
            waiting = ["text", "latin1", "TUPLE2"]


class _Global(str):
    """A function that a pickle names."""


def _fits(wanted: str, op: str, top: object) -> bool:
    is_text = isinstance(top, str) and not isinstance(top, _Global)
    if wanted == "text or bytes":  # bytes are made by `encode`
        return is_text or op == "EMPTY_TUPLE" or top == _Global("_codecs encode")
    if wanted == "text":
        return is_text
    return op == wanted if wanted == "TUPLE2" else top == wanted


def check_size(content: Any, size: int) -> None:
    """Refuse content that is much larger than its file, nests without end or contains itself: a ValueError."""
    nodes: dict[int, tuple[int, int]] = {}  # container → (values in it, levels below it)
    claimed: dict[tuple[Any, ...], int] = {}
    if isinstance(content, Tensor):
        _claim(content, claimed)
    stack: list[tuple[Any, Iterator[Any]]] = [(content, _inside(content))]
    path = {id(content)}
    counts: list[list[int]] = [[1, 0]]
    while stack:
        holder, values = stack[-1]
        value = next(values, stack)
        if value is stack:
            stack.pop()
            path.discard(id(holder))
            count, depth = counts.pop()
            nodes[id(holder)] = count, depth
            if counts:
                counts[-1][0] += count
                counts[-1][1] = max(counts[-1][1], depth + 1)
            if count > 4 * size + _NODES:
                raise ValueError(f"it unfolds to more than {count} values")
        elif type(value) in _ATOMS:  # most of them
            counts[-1][0] += 1
        elif isinstance(value, Tensor):
            counts[-1][0] += 1
            _claim(value, claimed)
        elif not isinstance(value, (Mapping, list, tuple, set, frozenset)) and not hasattr(value, "__dict__"):
            counts[-1][0] += 1
        elif id(value) in nodes:
            counts[-1][0] += nodes[id(value)][0]
            counts[-1][1] = max(counts[-1][1], nodes[id(value)][1] + 1)
        elif id(value) in path or len(stack) > _DEPTH:
            raise ValueError("its containers hold themselves, or others without end")
        else:
            stack.append((value, _inside(value)))
            path.add(id(value))
            counts.append([1, 0])
        if counts and counts[-1][1] > _DEPTH:
            raise ValueError(f"its containers are nested more than {_DEPTH} deep")
    if sum(claimed.values()) > 4 * size + _SLACK:
        raise ValueError(f"its tensors claim {sum(claimed.values())} bytes of a file of {size}")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield item
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    if hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).values()


def _claim(tensor: Tensor, claimed: dict[tuple[Any, ...], int]) -> None:
    """Enter the bytes that a tensor would take in memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        claimed[(id(tensor),)] = 0  # nothing reads such a one
        return
    size = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous():  # as many elements as memory, which torch has made sure of
        claimed[tensor.data_ptr(), size] = size
        return
    held = tensor.untyped_storage().nbytes()
    if size > max(held, 2**20):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} claims {size} bytes, its memory has {held}")
    claimed[tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype] = size


@dataclass
class fragment_address:
    """Where a parameter's part lies in a rank's flat shard."""

    numel: int
    start: int


ALLOWED: tuple[tuple[type, str], ...] = (
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (ZeroStageEnum, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (fragment_address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (argparse.Namespace, "argparse.Namespace"),
    (datetime.datetime, "datetime.datetime"),
    (datetime.date, "datetime.date"),
    (datetime.timedelta, "datetime.timedelta"),
    (pathlib.PosixPath, "pathlib.PosixPath"),
    (pathlib.PurePosixPath, "pathlib.PurePosixPath"),
    (decimal.Decimal, "decimal.Decimal"),
    (uuid.UUID, "uuid.UUID"),
)
"""The only classes beyond torch's own that a file may name, by the path where DeepSpeed has them.

The last are values that scripts gave to DeepSpeed as `client_state`; making one runs no code but its own.
"""

_FOREIGN = re.compile(r"Unsupported global: GLOBAL ([\w.]+)|unsupported GLOBAL ([\w.]+)")
_ONE_AT_A_TIME = threading.Lock()  # torch's allow-list belongs to the process: whoever leaves the scope first ends it


def safe_load(path: str | os.PathLike[str], *, mmap: bool = True, map_location: Any = "cpu") -> Any:
    """`torch.load(weights_only=True)` that also knows the classes of `ALLOWED`; every failure is a CheckpointError.

    With `mmap` the tensors are read when they are used, and changing one does not change the file.
    """
    place = Path(path)
    try:
        with open(open_regular(place), "rb") as file:
            start = file.read(4)
            size = os.fstat(file.fileno()).st_size
            zipped = start == b"PK\x03\x04"
            if zipped and not is_whole(place):
                raise CheckpointError(
                    f"{place}: truncated or damaged: {size} bytes ({gibibytes(size)}) without a zip directory at the "
                    "end. Writing it was interrupted, or it was cut by a copy. Load another checkpoint, or restore the "
                    "file."
                )
            if zipped:
                check_members(file, size)
            elif start[:1] == b"\x80":  # torch's older format: five pickles, then tensors
                file.seek(0)
                for _ in range(5):
                    check_pickle(file)
            if not (zipped or start[:1] == b"\x80") or place.suffix == ".safetensors":  # torch goes by that ending
                raise ValueError("it does not begin or is not called as one")
    except CheckpointError:
        raise
    except OSError as error:
        raise explain(error, place) from error
    except DAMAGE as error:
        raise _told(error, place, size) from error
    load = functools.partial(torch.load, place, map_location=map_location, weights_only=True, mmap=mmap and zipped)
    try:
        # torch's allow-list is one for all threads: another's must neither help this load nor end in its middle.
        with _ONE_AT_A_TIME:
            try:
                found = load()
            except pickle.UnpicklingError as error:
                if _foreign(error) not in [name for _, name in ALLOWED]:
                    raise
                with torch.serialization.safe_globals(list(ALLOWED)):
                    found = load()
        check_size(found, size)
    except DAMAGE as error:
        raise _told(error, place, size) from error
    return found


def _foreign(error: BaseException) -> str:
    """The class that the unpickler refused, empty if it is something else."""
    found = _FOREIGN.search(str(error))
    return "" if found is None else found.group(1) or found.group(2)


def _told(error: BaseException, place: Path, size: int) -> CheckpointError:
    name = _foreign(error)
    if name:
        return CheckpointError(
            f"{place} holds an object of {name}. Only plain values, tensors and DeepSpeed's own classes are read, "
            "because any other object can run code while it is read. If you trust the file, load it with "
            "torch.load(weights_only=False), replace the object by a plain value and save the file again."
        )
    if not size:
        return CheckpointError(f"{place} is empty: writing it was interrupted. Load another checkpoint.")
    reason = str(error).strip().splitlines()
    return CheckpointError(
        f"{place} ({size} bytes) cannot be read: {type(error).__name__}: {reason[0] if reason else 'no reason given'}. "
        "It is damaged or no file of torch.save. Load another checkpoint, or restore the file."
    )


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The first of a tensor's bytes in a file."""

    blocks: FileCheck
    start: int


class MappedCheck:
    """Compares the bytes under tensors that are views of a mapped file, of whatever format, with the manifest."""

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, shared: bool = False) -> None:
        self.path = Path(path)
        self.blocks = FileCheck(path, facts, shared=shared)
        self._base: int | None = None

    def require(self, tensor: Tensor) -> Tensor:
        """The same tensor, once the bytes under it are known to be what was written."""
        if tensor.numel():
            start = self._offset(tensor.data_ptr())
            if start is None:
                self.blocks.require(0, self.blocks.facts.size)
            else:
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                self.blocks.require(start, start + (last + 1) * tensor.element_size())
        return tensor

    def place(self, tensor: Tensor) -> FilePlace | None:
        """Where the bytes of a contiguous tensor lie."""
        start = self._offset(tensor.data_ptr()) if tensor.numel() and tensor.is_contiguous() else None
        return None if start is None else FilePlace(self.blocks, start)

    def _offset(self, address: int) -> int | None:
        if self._base is None:
            self._base = _mapped_at(address, self.path)
        if self._base is None or not 0 <= address - self._base < self.blocks.facts.size:
            return None  # memory of its own
        return address - self._base


class CheckedFile(MappedCheck):
    """A mapped torch file whose bytes are compared with the manifest before they are used.

    `state` is what the file holds; its tensors are good once they went through `require`.
    """

    def __init__(self, path: str | os.PathLike[str], facts: FileFacts, *, shared: bool = False) -> None:
        super().__init__(path, facts, shared=shared)
        for start, stop in self._skeleton(facts.size):
            self.blocks.require(start, stop)
        self.state: Any = safe_load(self.path)

    def _skeleton(self, size: int) -> list[tuple[int, int]]:
        """Where everything but tensors lies: the whole file if its directory does not tell."""
        try:
            with open(open_regular(self.path), "rb") as file, zipfile.ZipFile(file) as archive:
                records = [info for info in archive.infolist() if "/data/" not in info.filename]
                head = [(r.header_offset, r.header_offset + 1024 + r.file_size) for r in records]
                return [(archive.start_dir, size), *((start, min(stop, size)) for start, stop in head)]
        except (zipfile.BadZipFile, OSError, ValueError, struct.error):
            return [(0, size)]


def _mapped_at(address: int, path: Path) -> int | None:
    """The address of the file's first byte in the mapping that holds `address`."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        inode = path.stat().st_ino
    except OSError:
        return None
    for line in lines:
        words = line.split(None, 5)
        first, last = (int(word, 16) for word in words[0].split("-"))
        if first <= address < last:
            return first - int(words[2], 16) if int(words[4]) == inode else None
    return None


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
