"""Datasets of token sequences in two files: `<prefix>.bin` has the items, `<prefix>.idx` where each begins.

[Note: the files of an indexed dataset]
Written by Megatron and DeepSpeed, and by this module byte for byte. The index of the memory-mapped kind is the magic
`MMIDIDX`, a version, a code of the dtype, the number of items and of document boundaries; then int32 sizes, int64
byte offsets and int64 boundaries. The older kind, magic `TNTIDX`, has offsets and shapes in elements. Sizes in an
index are compared with the size of its file before anything is read, and offsets with the data when an item is.

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
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from deepspeed.errors import FileError, UsageError

__all__ = [
    "IndexedCachedDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "code",
    "create_doc_idx",
    "data_file_path",
    "dataset_exists",
    "exscan_from_cumsum_",
    "get_available_dataset_impl",
    "get_pointers_with_total",
    "index_file_path",
    "infer_dataset_impl",
    "make_builder",
    "make_dataset",
    "read_longs",
    "write_indexed",
    "write_longs",
]

Array = npt.NDArray[Any]
_DTYPES: dict[int, Any] = {
    number: np.dtype(name).type
    for number, name in enumerate(["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"], 1)
}
_MMAP, _OLD = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_OLD_HEAD = struct.Struct("<QQQQQQ")
_SMALL_VOCABULARY = 65_500
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


def read_longs(f: BinaryIO, n: int) -> Array:
    """`n` int64 of a file."""
    return np.fromfile(f, dtype=np.int64, count=n)


def write_longs(f: BinaryIO, a: Any) -> None:
    """Numbers as int64 of a file."""
    f.write(np.asarray(a, dtype=np.int64).tobytes())


def exscan_from_cumsum_(arr: Array) -> None:
    """Sums up to an element, in place, become sums before it."""
    if arr.size:
        arr[1:] = arr[:-1].copy()
        arr[0] = 0


def get_pointers_with_total(sizes: Any, elemsize: int, dtype: Any) -> tuple[Array, int]:
    """Where each item begins, in bytes, and how many bytes all have."""
    ends = np.cumsum(np.asarray(sizes, dtype=dtype) * dtype(elemsize), dtype=dtype)
    total = int(ends[-1]) if ends.size else 0
    exscan_from_cumsum_(ends)
    return ends, total


def create_doc_idx(sizes: Iterable[int]) -> list[int]:
    """Document boundaries of a dataset in which an empty item ends a document."""
    return [0, *(number + 1 for number, size in enumerate(sizes) if size == 0)]


def get_available_dataset_impl() -> list[str]:
    """What `make_dataset` takes besides "infer"."""
    return ["lazy", "cached", "mmap"]


def infer_dataset_impl(path: str) -> str | None:
    """The kind of a dataset by its index: "mmap", or "cached" of the older form; None where there is none."""
    if not Path(index_file_path(path)).is_file():
        return None
    with open(index_file_path(path), "rb") as f:
        magic = f.read(len(_MMAP))
    return "mmap" if magic == _MMAP else "cached" if magic.startswith(_OLD) else None


def dataset_exists(path: str, impl: str) -> bool:
    """Whether both files are there."""
    return all(Path(each).is_file() for each in (index_file_path(path), data_file_path(path)))


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> Any:
    """The dataset of a prefix: `impl` is lazy, cached, mmap or infer; None where the files are not of that kind."""
    known = [*get_available_dataset_impl(), "infer"]
    if impl not in known:
        raise UsageError(f"make_dataset: impl is {impl!r}; it must be one of {', '.join(known)}")
    kind = infer_dataset_impl(path) if impl == "infer" else impl
    if not dataset_exists(path, impl):
        raise FileError(errno.ENOENT, "no indexed dataset: expected two files, with .idx and .bin added", path)
    kinds = {"lazy": IndexedDataset, "cached": IndexedCachedDataset, "mmap": MMapIndexedDataset}
    return None if kind is None else kinds[kind](path)


def make_builder(out_file: str, impl: str, vocab_size: int | None = None) -> Any:
    """What writes a dataset; its dtype is the smallest that fits the vocabulary."""
    small = vocab_size is not None and vocab_size < _SMALL_VOCABULARY
    if impl == "mmap":
        return MMapIndexedDatasetBuilder(out_file, dtype=np.uint16 if small else np.int32)
    return IndexedDatasetBuilder(out_file)


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
            magic, head = f.read(len(_MMAP)), f.read(_HEAD.size)
        size = os.path.getsize(index)
        if magic != _MMAP or len(head) < _HEAD.size:
            raise _broken(index, f"it begins with {magic!r}; expected {_MMAP!r}, a version and counts")
        version, number, count, documents = _HEAD.unpack(head)
        if version != 1 or number not in _DTYPES:
            raise _broken(
                index, f"version {version} and dtype code {number}; expected version 1 and a code from 1 to 8"
            )
        begin, needed = len(_MMAP) + _HEAD.size, count * 12 + documents * 8
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

    def get_doc_idx(self) -> Array:
        """`doc_idx`."""
        return self._doc_idx

    def set_doc_idx(self, doc_idx_: Array) -> None:
        """Replace the boundaries, in memory."""
        self._doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        """False: the system reads ahead."""
        return False

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return dataset_exists(path, "mmap")

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

    def add_items(self, arr_list: Iterable[Any]) -> None:
        """Append several."""
        for each in arr_list:
            self.add_item(each)

    def add_item_numpy(self, np_array: Array) -> None:
        """Append an array."""
        self._data_file.write(np.ascontiguousarray(np_array, dtype=self._dtype).tobytes())
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
    pointers, _ = get_pointers_with_total(sizes, dtype.itemsize, np.int64)
    with open(path, "wb") as f:
        f.write(_MMAP + _HEAD.pack(1, code(dtype), len(sizes), len(doc_idx)))
        f.write(sizes.astype(np.int32, copy=False).tobytes())
        f.write(pointers.tobytes())
        write_longs(f, doc_idx)


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


class IndexedDataset(torch.utils.data.Dataset[Array]):
    """A dataset of the older kind, whose items are read from the file one by one."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.data_file: BinaryIO | None = None
        self.read_index(path)

    def read_index(self, path: str) -> None:
        """Read where the items are."""
        index = index_file_path(path)
        with _reading(index) as f:
            magic, head = f.read(len(_OLD)), f.read(_OLD_HEAD.size)
            if magic != _OLD or len(head) < _OLD_HEAD.size:
                raise _broken(index, f"it begins with {magic!r}; expected {_OLD!r}, a version and counts")
            version, number, self.element_size, self._len, sizes, documents = _OLD_HEAD.unpack(head)
            if version != 1 or number not in _DTYPES:
                raise _broken(index, f"version {version} and dtype code {number}; expected 1 and a code from 1 to 8")
            needed = f.tell() + 8 * (2 * (self._len + 1) + sizes + documents)
            if os.path.getsize(index) != needed:
                raise _broken(index, f"{os.path.getsize(index)} bytes; its {self._len} items need {needed}")
            self.dtype = _DTYPES[number]
            self.dim_offsets, self.data_offsets = read_longs(f, self._len + 1), read_longs(f, self._len + 1)
            self.sizes, self.doc_idx = read_longs(f, sizes), read_longs(f, documents)

    def read_data(self, path: str) -> None:
        """Open the items."""
        self.data_file = open(data_file_path(path), "rb", buffering=0)  # noqa: SIM115 - open as long as the dataset

    def check_index(self, i: int) -> None:
        """Refuse the number of an item that is not there."""
        if not 0 <= i < self._len:
            raise IndexError(f"item {i} of {self._len}")

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return [self[each] for each in range(*idx.indices(len(self)))]
        return self._item(idx)

    def _item(self, idx: int) -> Array:
        self.check_index(idx)
        if self.data_file is None:
            self.read_data(self.path)
        assert self.data_file is not None, "just opened"
        shape = self.sizes[self.dim_offsets[idx] : self.dim_offsets[idx + 1]]
        begin, stop = (
            int(self.data_offsets[idx]) * self.element_size,
            int(self.data_offsets[idx + 1]) * self.element_size,
        )
        self.data_file.seek(max(begin, 0))
        inside = 0 <= begin <= stop <= os.fstat(self.data_file.fileno()).st_size
        found = np.frombuffer(self.data_file.read(stop - begin) if inside else b"", self.dtype)
        if not inside or found.size != int(np.prod(shape)):
            raise _broken(
                index_file_path(self.path), f"item {idx} of shape {shape.tolist()} lies in bytes {begin} to {stop}"
            )
        return found.reshape(shape)

    def __len__(self) -> int:
        return int(self._len)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_file": None}

    def num_tokens(self, index: int) -> int:
        """Elements of an item."""
        return int(self.sizes[index])

    size = num_tokens

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return dataset_exists(path, "lazy")

    @property
    def supports_prefetch(self) -> bool:
        """Whether `prefetch` does anything."""
        return False


class IndexedCachedDataset(IndexedDataset):
    """The same, of which items stay in memory once they were read or prefetched."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._kept = lru_cache(maxsize=None)(super()._item)

    def _item(self, idx: int) -> Array:
        return self._kept(idx)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    @property
    def supports_prefetch(self) -> bool:
        return True

    def prefetch(self, indices: Iterable[int]) -> None:
        """Read these items now."""
        for each in sorted(set(indices)):
            self._item(each)


class IndexedDatasetBuilder:
    """Writes a dataset of the older kind."""

    def __init__(self, out_file: str, dtype: Any = np.int32) -> None:
        self.out_file = open(out_file, "wb")  # noqa: SIM115 - closed by finalize
        self.dtype = np.dtype(dtype)
        self._lengths: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self.doc_idx = [0]

    def add_item(self, tensor: Any) -> None:
        """Append a tensor of any shape."""
        values = np.ascontiguousarray(tensor, dtype=self.dtype)
        self.out_file.write(values.tobytes())
        self._lengths.append(values.size)
        self._shapes.append(values.shape)

    def end_document(self) -> None:
        """A document ends after the last item."""
        self.doc_idx.append(len(self._lengths))

    def merge_file_(self, another_file: str) -> None:
        """Append another dataset of the same dtype."""
        other = IndexedDataset(another_file)
        if np.dtype(other.dtype) != self.dtype:
            raise UsageError(f"{another_file} holds {np.dtype(other.dtype)}; expected {self.dtype}, as this one")
        before = len(self._lengths)
        self._lengths += np.diff(other.data_offsets).tolist()
        bounds = other.dim_offsets
        self._shapes += [tuple(other.sizes[one:two].tolist()) for one, two in pairwise(bounds)]
        self.doc_idx += (other.doc_idx[1:] + before).tolist()
        with open(data_file_path(another_file), "rb") as f:
            shutil.copyfileobj(f, self.out_file, 1 << 24)

    def finalize(self, index_file: str) -> None:
        """Close the items and write the index."""
        self.out_file.close()
        sizes = [size for shape in self._shapes for size in shape]
        with open(index_file, "wb") as f:
            counts = (len(self._lengths), len(sizes), len(self.doc_idx))
            f.write(_OLD + _OLD_HEAD.pack(1, code(self.dtype), self.dtype.itemsize, *counts))
            write_longs(f, list(accumulate(map(len, self._shapes), initial=0)))
            write_longs(f, list(accumulate(self._lengths, initial=0)))
            write_longs(f, sizes)
            write_longs(f, self.doc_idx)


def _reading(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileError(
            error.errno, "an indexed dataset is two files, <prefix>.idx and <prefix>.bin; this one cannot be read", path
        ) from error


def _broken(path: str, found: str) -> FileError:
    return FileError(errno.EINVAL, f"broken index of a dataset: {found}. Write the dataset again", path)
