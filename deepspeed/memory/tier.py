"""Where states live outside of the device: `Tier` and `StateTiers`, which say so, swap files and stores.

[Note: regions rest in the page cache] A region is a part of one shared mapping of the file. Whoever reads or writes it
as a tensor, a checkpoint for instance, does so through the page cache, which the kernel frees as it needs memory. The
step goes past the cache: its file engine fills and writes buffers of its own. The kernel keeps both views of the file
the same as long as they are not used at the same time.

[Note: no name] The file has no name from the beginning, or from before anything is written. So it is private, two jobs
never meet in a folder, and the system frees its space when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from deepspeed.comm import Pending
from deepspeed.config.memory import AioConfig, size_text
from deepspeed.errors import FileError
from deepspeed.ops.aio import FileEngine

_PAGE = 4096
_UNNAMED = getattr(os, "O_TMPFILE", 0)


class SwapFile:
    """See [Note: no name]. What the disk has free now can be taken from it; only what is taken uses it."""

    def __init__(self, folder: Path, key: str) -> None:
        """`key` is that of the config which names the folder."""
        self._folder, self._key = folder, key
        self._taken = 0
        self._descriptor = _open(folder, key)
        facts = os.fstatvfs(self._descriptor)
        self._capacity = max(facts.f_bavail * facts.f_frsize // _PAGE, 1) * _PAGE
        self.path = f"/proc/self/fd/{self._descriptor}"
        """By which this process opens the file again."""
        os.ftruncate(self._descriptor, self._capacity)
        self._storage: Any = torch.UntypedStorage.from_file(self.path, True, self._capacity)
        self._end = weakref.finalize(self, os.close, self._descriptor)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A region, through the page cache; its space on the disk is there from now on."""
        size = -(-numel * dtype.itemsize // _PAGE) * _PAGE
        offset = self._taken
        if size:
            self._allocate(offset, size)
        self._taken += size
        return torch.empty(0, dtype=dtype).set_(self._storage, offset // dtype.itemsize, (numel,), (1,))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make sure of space for regions of so many bytes, to be taken later."""
        size = sum(-(-each // _PAGE) * _PAGE for each in sizes)
        if size:
            self._allocate(self._taken, size)

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies in the file."""
        return bool(tensor.untyped_storage().data_ptr() == self._storage.data_ptr())

    def offset_of(self, tensor: Tensor) -> int:
        """Where in the file a tensor of it begins."""
        return int(tensor.storage_offset()) * tensor.element_size()

    @property
    def taken(self) -> int:
        """Bytes of all regions."""
        return self._taken

    def close(self) -> None:
        """Give the disk its space back once no region is held any more; harmless when repeated."""
        self._end()

    def _allocate(self, offset: int, size: int) -> None:
        try:
            if offset + size > self._capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._descriptor, offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self._folder).free
            raise FileError(
                error.errno,
                f"{self._key}: {size_text(size)} more were needed beside {size_text(offset)} of this rank, and "
                f"{size_text(free)} are free. Free space, name another folder, or offload to the cpu",
                str(self._folder),
            ) from error


def _open(folder: Path, key: str) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _UNNAMED:
            with contextlib.suppress(OSError):  # not every file system has files without a name
                return os.open(folder, _UNNAMED | os.O_RDWR, 0o600)
        descriptor, path = tempfile.mkstemp(prefix="deepspeed-swap-", dir=folder)
        os.unlink(path)
        return descriptor
    except OSError as error:
        raise FileError(
            error.errno or 0,
            f"{key}: no file can be made in this folder ({error.strerror}); name a folder on a local disk that this "
            "user may write to",
            str(folder),
        ) from error


def file_engine(aio: AioConfig) -> FileEngine:
    """The file engine of the section `aio`."""
    return FileEngine(
        block_size=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.intra_op_parallelism,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
    )


T = TypeVar("T")
Tile = TypeVar("Tile", contravariant=True)


class StateStore(Protocol[Tile]):
    """Keeps masters and moments of tiles in a tier; what was fetched stays where it is until it is kept again."""

    def fetch(self, tile: Tile) -> Pending[None]:
        """Begin to bring the states of a tile to where the optimizer works."""

    def keep(self, tile: Tile) -> Pending[None]:
        """Begin to put them back, changed."""


class DeviceStore:
    """States that lie where the optimizer works: nothing moves."""

    def fetch(self, tile: object) -> Pending[None]:
        return Pending(None)

    def keep(self, tile: object) -> Pending[None]:
        return Pending(None)


def through(
    tiles: Sequence[T], store: StateStore[T], work: Callable[[T], None], *, ahead: int = 1, behind: int = 1
) -> None:
    """Work on every tile in order: `ahead` of them are being fetched, and `behind` kept, while one is worked on."""
    fetched = deque(store.fetch(tile) for tile in tiles[: ahead + 1])
    kept: deque[Pending[None]] = deque()
    for place, tile in enumerate(tiles):
        if not fetched:
            fetched.append(store.fetch(tile))
        fetched.popleft().wait()
        work(tile)
        kept.append(store.keep(tile))
        while len(kept) > behind:
            kept.popleft().wait()
        if ahead and place + ahead + 1 < len(tiles):
            fetched.append(store.fetch(tiles[place + ahead + 1]))
    while kept:
        kept.popleft().wait()


class Tier(str, Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class TierRule(Protocol):
    """Says which tier things live in; they ask in the order of the model, whose first gradients come last."""

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        """The tier of each of these neighbours, from their elements; slower ones follow faster ones."""


@dataclass(frozen=True)
class ShareInTier:
    """A share of the elements of all neighbours in one tier, the last ones; the others stay on the device."""

    tier: Tier
    share: float = 1.0

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        total, kept = sum(sizes), 0
        stays, found = total - self.share * total, []
        for size in sizes:
            kept += size
            found.append(self.tier if kept > stays or self.tier in found else Tier.DEVICE)
        return found


EVERYTHING_AWAY = ShareInTier(Tier.HOST)
"""Nothing stays on the device."""


class ElementsPerTier:
    """So many elements in each tier, the fastest first; what does not fit the next one any more, nor all the others."""

    def __init__(self, elements: Mapping[Tier, int]) -> None:
        """The slowest tier that has some takes whatever comes."""
        self._left = [(tier, count) for tier, count in elements.items() if count] or [(Tier.DEVICE, 0)]

    def place(self, sizes: Sequence[int]) -> list[Tier]:
        """See `TierRule`; what was placed before is remembered."""
        return [self._take(size) for size in sizes]

    def _take(self, size: int) -> Tier:
        while len(self._left) > 1 and self._left[0][1] < size:
            self._left.pop(0)
        tier, left = self._left[0]
        self._left[0] = (tier, left - size)
        return tier


@dataclass(frozen=True)
class StateTiers:
    """Where masters, moments and gradients of an engine's parameters live between steps."""

    rooms: TierRule = ShareInTier(Tier.DEVICE)
    away: bool = False
    """Some may leave the device."""
    pinned: bool = True
    """Host memory that the device reads and writes is page-locked."""
    tile: int = 1 << 25
    """Elements that are updated at a time."""
    once: bool = False
    """A gradient comes once a step, as far as the config says."""
    swap: SwapFile | None = None
    """Of the tier DISK."""


ON_DEVICE = StateTiers()
"""Everything lives on the device."""
