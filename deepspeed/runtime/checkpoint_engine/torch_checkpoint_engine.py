"""`TorchCheckpointEngine`: files of torch.save, durable, read without running code from them. The default."""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.storage.durable import write_tensorfile
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["TorchCheckpointEngine"]


class TorchCheckpointEngine(CheckpointEngine):
    """One file per state dict.

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
