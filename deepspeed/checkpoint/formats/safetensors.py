"""The safetensors file format: a JSON header, then the tensors' bytes. Read through a memory map; no package needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from deepspeed.checkpoint.storage.tensor_memory import bytes_of
from deepspeed.errors import CheckpointError

__all__ = ["Content", "chunks", "open_file", "save", "size"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_STEP = 64 * 2**20


@dataclass(slots=True)
class Content:
    """The tensors of a file, in order, and its text metadata."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def _ordered(content: Content) -> list[tuple[str, Tensor]]:
    """Wide elements first, so that each tensor begins at a multiple of its element size."""
    return sorted(content.tensors.items(), key=lambda item: -item[1].element_size())


def _header(content: Content) -> bytes:
    entries: dict[str, object] = {"__metadata__": content.metadata} if content.metadata else {}
    end = 0
    for name, tensor in _ordered(content):
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which the safetensors format does not have")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # data begins aligned, so that a memory map of it is
    return len(text).to_bytes(8, "little") + text


def size(content: Content) -> int:
    """Bytes of the file."""
    return len(_header(content)) + sum(tensor.numel() * tensor.element_size() for tensor in content.tensors.values())


def chunks(content: Content) -> Iterator[memoryview | bytes]:
    """The bytes of the file in order; of host tensors without a copy."""
    yield _header(content)
    for _, tensor in _ordered(content):
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            data = bytes_of(host)
            for start in range(0, host.nbytes, _STEP):
                yield data[start : start + _STEP]


def save(content: Content, target: Path | BinaryIO) -> None:
    """Write a file."""
    if isinstance(target, Path):
        with target.open("wb") as file:
            save(content, file)
        return
    for chunk in chunks(content):
        target.write(chunk)


def open_file(path: Path) -> Content:
    """The tensors of a file as views of its memory map: nothing is read but the header."""
    total = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > total:
            raise CheckpointError(f"{path}: the header claims {length} bytes, the file has {total}. It is damaged")
        try:
            entries: Mapping[str, dict[str, object]] = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: the header is not JSON ({error}). The file is damaged") from error
    metadata = {str(key): str(value) for key, value in entries.get("__metadata__", {}).items()}
    mapped = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8) if total > 8 + length else None
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensors[name] = _view(path, name, entry, mapped, 8 + length)
    return Content(tensors, metadata)


def _view(path: Path, name: str, entry: Mapping[str, object], mapped: Tensor | None, base: int) -> Tensor:
    offsets, shape, kind = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not (isinstance(offsets, list) and isinstance(shape, list) and kind in _DTYPES):
        raise CheckpointError(f"{path}: the header's entry of {name} is {entry}, which is not of this format")
    begin, end = offsets
    dtype = _DTYPES[str(kind)]
    held = 0 if mapped is None else mapped.numel() - base
    numel = torch.Size(shape).numel()
    if end > held or end - begin != numel * dtype.itemsize:
        raise CheckpointError(
            f"{path}: {name} with {numel} elements should lie at bytes {begin} to {end} of {held}: the file is cut off"
        )
    if mapped is None or numel == 0:
        return torch.empty(shape, dtype=dtype)
    part = mapped[base + begin : base + end]
    aligned = part if (base + begin) % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype).view(shape)
