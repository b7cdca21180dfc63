"""Datasets of token sequences in two files: `<prefix>.bin` has the items, `<prefix>.idx` where each begins.

[Note: the files of an indexed dataset]
Written by Megatron and DeepSpeed, and by this module byte for byte. The index is the magic `MMIDIDX`, a version, a code
of the dtype, the number of items and of document boundaries; then int32 sizes, int64 byte offsets and int64 boundaries.
Sizes in an index are compared with the size of its file before anything is read, and offsets with the data when an item
is.

Megatron has code 8 for uint16, which is 6 here, as in DeepSpeed, where 8 is uint64. Which of them it is follows from
where the last item ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from deepspeed.errors import FileError, UsageError

__all__ = [
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "code",
    "data_file_path",
    "index_file_path",
    "write_indexed",
]

Array = npt.NDArray[Any]
_DTYPES: dict[int, Any] = {
    number: np.dtype(name).type
    for number, name in enumerate(["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"], 1)
}
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TAIL = 1000


def code(dtype: Any) -> int:
    """The number of a dtype in an index."""
    for number, known in _DTYPES.items():
        if np.dtype(known) == np.dtype(dtype):
            return number
    raise UsageError(f"an indexed dataset cannot hold {np.dtype(dtype)}; it holds integers of 8 to 64 bits")


def index_file_path(prefix_path: str) -> str:
    """The file that says where items are."""
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str) -> str:
    """The file of the items."""
    return f"{prefix_path}.bin"


class MMapIndexedDataset(torch.utils.data.Dataset[Array]):
    """Items as arrays over memory-mapped files; see [Note: the files of an indexed dataset].

    `skip_warmup` changes nothing: pages are read when they are used.
    """

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        super().__init__()
        self._path = path
        self._open()

    def _open(self) -> None:
        index = index_file_path(self._path)
        with _reading(index) as f:
            magic, head = f.read(len(_MAGIC)), f.read(_HEAD.size)
        size = os.path.getsize(index)
        if magic != _MAGIC or len(head) < _HEAD.size:
            raise _broken(index, f"it begins with {magic!r}; expected {_MAGIC!r}, a version and counts")
        version, number, count, documents = _HEAD.unpack(head)
        if version != 1 or number not in _DTYPES:
            raise _broken(
                index, f"version {version} and dtype code {number}; expected version 1 and a code from 1 to 8"
            )
        begin, needed = len(_MAGIC) + _HEAD.size, count * 12 + documents * 8
        if size != begin + needed:
            raise _broken(index, f"{size} bytes; {count} items and {documents} boundaries need {begin + needed}")
        self.dtype_of_items = np.dtype(_DTYPES[number])
        self._index = np.memmap(index, mode="r") if size else np.empty(0, np.uint8)
        whole = memoryview(self._index)  # type: ignore[arg-type]
        self._sizes: Array = np.frombuffer(whole, np.int32, count, begin)
        self._pointers: Array = np.frombuffer(whole, np.int64, count, begin + count * 4)
        self._doc_idx: Array = np.frombuffer(whole, np.int64, documents, begin + count * 12)
        data = data_file_path(self._path)
        with _reading(data):
            empty = os.path.getsize(data) == 0
        self._data = memoryview(b"" if empty else np.memmap(data, mode="r"))  # type: ignore[arg-type]
        if number == code(np.uint64) and self._ends_as(np.dtype(np.uint16)):
            self.dtype_of_items = np.dtype(np.uint16)

    def _ends_as(self, dtype: np.dtype[Any]) -> bool:
        """Whether the last item that has elements, of this dtype, ends where the data does."""
        last = np.flatnonzero(self._sizes[-_TAIL:])
        at = len(self) - min(len(self), _TAIL) + (int(last[-1]) if last.size else 0)
        return last.size > 0 and int(self._pointers[at]) + int(self._sizes[at]) * dtype.itemsize == len(self._data)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path = path
        self._open()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, idx: Any) -> Any:
        try:
            size = self._sizes.item(idx)
            if size > 0:
                return np.frombuffer(self._data, self.dtype_of_items, size, self._pointers.item(idx))
        except (TypeError, ValueError):
            pass  # a slice, or an item outside the file
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(f"slices of an indexed dataset are contiguous; found a step of {step}")
            return [self.get(each) for each in range(start, stop)]
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """An item, or `length` elements of it from `offset` on; a view of the file."""
        size, begin = int(self._sizes[idx]), int(self._pointers[idx])
        count = size - offset if length is None else length
        if not (0 <= offset <= size and 0 <= count <= size - offset):
            raise (
                self._outside(idx, size, begin)
                if size < 0
                else IndexError(f"item {idx} has {size} elements; asked for {count} from {offset} on")
            )
        try:
            return np.frombuffer(self._data, self.dtype_of_items, count, begin + offset * self.dtype_of_items.itemsize)
        except ValueError:
            if count == 0:
                return np.empty(0, self.dtype_of_items)
            raise self._outside(idx, size, begin) from None

    def _outside(self, idx: int, size: int, begin: int) -> FileError:
        return _broken(
            index_file_path(self._path),
            f"item {idx} has {size} elements from byte {begin} on, but {data_file_path(self._path)} has "
            f"{len(self._data)} bytes: one of them was cut, or they are of two datasets",
        )

    def elements(self, start: int = 0, stop: int | None = None) -> Array:
        """Elements of all items, one behind the other; a view of the file."""
        kind = self.dtype_of_items
        return np.frombuffer(self._data, kind, len(self._data) // kind.itemsize)[start:stop]

    def first_element(self, idx: int) -> int:
        """Where an item begins among `elements`, and behind the last item where they end."""
        if idx == len(self):
            return self.first_element(idx - 1) + self.size(idx - 1) if idx else 0
        return int(self._pointers[idx]) // int(self.dtype_of_items.itemsize)

    @property
    def sizes(self) -> Array:
        """Elements of each item."""
        return self._sizes

    def size(self, index: int) -> int:
        """Elements of an item."""
        return int(self._sizes[index])

    @property
    def doc_idx(self) -> Array:
        """The items at which documents begin, and the number of items."""
        return self._doc_idx

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return all(Path(each).is_file() for each in (index_file_path(path), data_file_path(path)))

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.dtype_of_items.type


class MMapIndexedDatasetBuilder:
    """Writes such a dataset item by item; `finalize` writes the index."""

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._data_file = open(out_file, "wb")  # noqa: SIM115 - closed by finalize
        self._dtype = np.dtype(dtype)
        code(dtype)
        self._sizes = array("i")
        self._doc_idx = array("q", [0])

    def add_item(self, tensor: Any) -> None:
        """Append a tensor."""
        self.add_item_numpy(tensor.numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor))

    def add_item_numpy(self, np_array: Array) -> None:
        """Append an array, whose numbers the dtype of the dataset has to hold."""
        made = np.ascontiguousarray(np_array, dtype=self._dtype)
        if made.dtype != np_array.dtype and self._dtype.kind in "iu" and not np.array_equal(made, np_array):
            raise UsageError(
                f"item {len(self._sizes)} has numbers from {np_array.min()} to {np_array.max()}, which {self._dtype} "
                "cannot hold; give the builder a wider dtype"
            )
        self._data_file.write(made.tobytes())
        self._sizes.append(np_array.size)

    def end_document(self) -> None:
        """A document ends after the last item."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append another dataset of the same dtype; its documents follow."""
        other = MMapIndexedDataset(another_file)
        if other.dtype_of_items != self._dtype:
            raise UsageError(f"{another_file} holds {other.dtype_of_items}; expected {self._dtype}, as this one")
        before = len(self._sizes)
        self._sizes.frombytes(other.sizes.tobytes())
        self._doc_idx.extend((other.doc_idx[1:] + before).tolist())
        with open(data_file_path(another_file), "rb") as f:
            shutil.copyfileobj(f, self._data_file, 1 << 24)

    def finalize(self, index_file: str) -> None:
        """Close the items and write the index."""
        self._data_file.close()
        _write_index(index_file, self._dtype, np.frombuffer(self._sizes, np.int32), self._doc_idx)


def _write_index(path: str, dtype: np.dtype[Any], sizes: Array, doc_idx: Sequence[int]) -> None:
    ends = np.cumsum(sizes.astype(np.int64) * dtype.itemsize, dtype=np.int64)
    with open(path, "wb") as f:
        f.write(_MAGIC + _HEAD.pack(1, code(dtype), len(sizes), len(doc_idx)))
        f.write(sizes.astype(np.int32, copy=False).tobytes())
        f.write((ends - sizes.astype(np.int64) * dtype.itemsize).tobytes())
        f.write(np.asarray(doc_idx, dtype=np.int64).tobytes())


def write_indexed(prefix: str, parts: Iterable[Array], sizes: Array | None = None) -> int:
    """Write arrays of one dtype one behind the other, which together need not fit in memory; how many elements.

    Items have these sizes; without, each array is an item. A crash leaves no index, so that none of it counts.
    """
    Path(index_file_path(prefix)).unlink(missing_ok=True)
    lengths, dtype = [], np.dtype(np.uint8)
    with open(data_file_path(prefix), "wb") as f:
        for part in parts:
            np.ascontiguousarray(part).tofile(f)
            lengths.append(part.size)
            dtype = part.dtype
        f.flush()
        os.fsync(f.fileno())
    items = np.array(lengths) if sizes is None else sizes
    _write_index(f"{index_file_path(prefix)}.part", dtype, items, [0, len(items)])
    os.replace(f"{index_file_path(prefix)}.part", index_file_path(prefix))
    return sum(lengths)


def _reading(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileError(
            error.errno, "an indexed dataset is two files, <prefix>.idx and <prefix>.bin; this one cannot be read", path
        ) from error


def _broken(path: str, found: str) -> FileError:
    return FileError(errno.EINVAL, f"broken index of a dataset: {found}. Write the dataset again", path)
