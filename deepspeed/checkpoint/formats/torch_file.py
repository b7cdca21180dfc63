"""What a file of torch.save must be before torch reads it, and what it may make of a little: nothing much larger.

torch's safe unpickler runs no code, but it unpacks compressed members, makes byte arrays of any length, and gives
tensors that claim more elements than there are bytes. Files of torch.save do none of that. The answer to each is to
refuse the file, at a cost that does not grow with its tensors.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor

__all__ = ["check_members", "check_pickle", "check_size"]

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
