"""The safetensors file format: a JSON header, then the tensors' bytes. Read through a memory map; no package needed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from deepspeed.errors import CheckpointError
from deepspeed.ops.native import bytes_of
from deepspeed.trust import open_regular

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_STEP = 64 * 2**20
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(slots=True)
class TensorFile:
    """The tensors of a file, in order, and its text metadata."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def _ordered(content: TensorFile) -> list[tuple[str, Tensor]]:
    """Wide elements first, so that each tensor begins at a multiple of its element size."""
    return sorted(content.tensors.items(), key=lambda item: -item[1].element_size())


def header(tensors: Iterable[tuple[str, torch.Size, torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of these tensors, which follow in this order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape, dtype in tensors:
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which the safetensors format does not have")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # data begins aligned, so that a memory map of it is
    return len(text).to_bytes(8, "little") + text


def _header(content: TensorFile) -> bytes:
    return header([(name, tensor.shape, tensor.dtype) for name, tensor in _ordered(content)], content.metadata)


def size(content: TensorFile) -> int:
    """Bytes of the file."""
    return len(_header(content)) + sum(tensor.numel() * tensor.element_size() for tensor in content.tensors.values())


def chunks(content: TensorFile) -> Iterator[memoryview | bytes]:
    """The bytes of the file in order; of host tensors without a copy."""
    yield _header(content)
    for _, tensor in _ordered(content):
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            data = bytes_of(host)
            for start in range(0, host.nbytes, _STEP):
                yield data[start : start + _STEP]


def save(content: TensorFile, target: Path | BinaryIO) -> None:
    """Write a file."""
    if isinstance(target, Path):
        with target.open("wb") as file:
            save(content, file)
        return
    for chunk in chunks(content):
        target.write(chunk)


def open_file(path: Path) -> TensorFile:
    """The tensors of a file as views of its memory map: nothing is read but the header."""
    with open(open_regular(path), "rb") as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > total or length > _LONGEST_HEADER:
            raise CheckpointError(f"{path}: the header claims {length} bytes, the file has {total}. It is damaged")
        text = file.read(length)
    try:
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise ValueError(f"it is {type(entries).__name__}, expected an object")
        about = entries.pop("__metadata__", {})
        if not isinstance(about, dict):
            raise ValueError(f"__metadata__ is {type(about).__name__}, expected an object")
        places = {name: _place(name, entry) for name, entry in entries.items()}
        _must_tile([(begin, end) for _, _, begin, end in places.values()], total - 8 - length)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not one of safetensors ({error}). The file is damaged") from error
    mapped = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8) if total > 8 + length else None
    tensors = {name: _view(mapped, 8 + length, *place) for name, place in places.items()}
    return TensorFile(tensors, {str(key): str(value) for key, value in about.items()})


_Place = tuple[torch.dtype, list[int], int, int]  # dtype, shape, first byte and the one after the last


def _place(name: str, entry: object) -> _Place:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r:.200} is {type(entry).__name__}, expected an object")
    offsets, shape, kind = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not (isinstance(offsets, list) and len(offsets) == 2 and isinstance(shape, list) and isinstance(kind, str)):
        raise ValueError(f"the entry of {name!r:.200} is {entry!r:.200}")
    if kind not in _DTYPES or not all(type(number) is int and number >= 0 for number in (*offsets, *shape)):
        raise ValueError(f"{name!r:.200} has dtype {kind!r:.20}, shape {shape!r:.100}, offsets {offsets!r:.100}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPES[kind].itemsize:
        raise ValueError(f"{name!r:.200} of shape {shape!r:.100} cannot lie at bytes {begin} to {end}")
    return _DTYPES[kind], shape, begin, end


def _must_tile(places: list[tuple[int, int]], size: int) -> None:
    """Tensors follow each other and fill the file: none is outside, none shares bytes with another."""
    reached = 0
    for begin, end in sorted(places):
        if begin != reached:
            raise ValueError(f"a tensor begins at byte {begin}, where {reached} was expected")
        reached = end
    if reached != size:
        raise ValueError(f"tensors take {reached} bytes of {size}: the file is cut off")


def _view(mapped: Tensor | None, base: int, dtype: torch.dtype, shape: list[int], begin: int, end: int) -> Tensor:
    if mapped is None or begin == end:
        return torch.empty(shape, dtype=dtype)
    part = mapped[base + begin : base + end]
    aligned = part if (base + begin) % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype).view(shape)
