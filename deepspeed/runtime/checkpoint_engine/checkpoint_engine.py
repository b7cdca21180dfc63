"""`CheckpointEngine`: the base of what writes and reads the files of checkpoints in a way of its own.

    class Compressed(CheckpointEngine):
        def create(self, info): ...
        def save(self, state_dict, path): ...
        def load(self, path, map_location=None): ...
        def commit(self, info): return True

    engine.checkpoint_engine = Compressed()

`save_checkpoint` calls `create` once, `makedirs`, `save` for each file of this rank, and `commit` when all ranks have
saved; then the first rank writes `latest`. `load_checkpoint` calls `load` for the files of the checkpoint.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.storage.durable import write_tensorfile

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]


@dataclass
class CheckpointCommitInfo:
    """The checkpoint that is being written."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads files; every rank has one."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None
        self._info: CheckpointCommitInfo | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file so that `load` finds it by the same path."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """What `save` was given for this path."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool | None:
        """All ranks have saved; False says that the checkpoint is not to be used."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make the directory of the checkpoint."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """True if this data-parallel rank writes what all of them have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """True if `save` returns before the file is written."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Remember the checkpoint that is being written."""
        self._info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint that is being written, or was last."""
        return self._info

    def cleanup(self) -> None:  # noqa: B027 - most have nothing to do
        """Called when the engine is destroyed: wait for what is still being written, close what is open."""

    def preserves_storage_sharing(self) -> bool:
        """True if tensors that share memory still do after `load`."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Files of torch.save, one per state dict: durable, and read without running code from them. The default.

    While the engine has this one and no other, it writes such files itself: staged, with checksums and a manifest.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""
        self.set_commit_info(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; it is there whole, or as it was before."""
        write_tensorfile(path, state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What the file holds; tensors, containers and plain values, never code."""
        return safe_load(path, mmap=False, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Every file was forced to the disk when it was saved."""
        return True
