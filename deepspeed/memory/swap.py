"""`SwapFile`: a file without a name from which regions are taken, each of them a tensor.

[Note: regions rest in the page cache] A region is a part of one shared mapping of the file. Whoever reads or writes it
as a tensor, a checkpoint for instance, does so through the page cache, which the kernel frees as it needs memory. The
step goes past the cache: its file engine fills and writes buffers of its own. The kernel keeps both views of the file
the same as long as nobody uses them at the same time.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.config.memory import size_text
from deepspeed.errors import FileError

__all__ = ["SwapFile"]

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
        """Give the disk its space back once nobody holds a region any more; harmless when repeated."""
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
