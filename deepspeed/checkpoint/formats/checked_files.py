"""Opens the files of one checkpoint, each once, and compares what is used of them with the manifest."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from deepspeed.checkpoint.formats.guard import reading
from deepspeed.checkpoint.formats.safe_load import CheckedFile, FilePlace, MappedCheck, safe_load
from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.block_reader import FileCheck
from deepspeed.checkpoint.storage.block_writer import FileFacts
from deepspeed.checkpoint.storage.durable import tensors_in
from deepspeed.errors import CheckpointError
from deepspeed.trust import inside, open_regular, read_regular

T = TypeVar("T")

_LARGEST_TEXT = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Opened:
    """What a file holds; its tensors are views of a memory map."""

    state: Any
    require: Callable[[Tensor], Tensor]
    """The same tensor, once its bytes are known to be what was written."""
    place: Callable[[Tensor], FilePlace | None]
    """Where a tensor's bytes lie in the file, for a reader that checks them on the way; None where that is unknown."""

    def checked(self, values: T) -> T:
        """Small values of the file, tensors among them checked."""
        for tensor in tensors_in(values):
            self.require(tensor)
        return values


class Opener:
    """The files of one directory; a checkpoint without a manifest is read unchecked."""

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.directory = directory
        found = manifest.read(directory) if verify else None
        self._facts: Mapping[str, FileFacts] = {} if found is None else found.files
        self._opened: dict[str, Opened] = {}
        self._lock = threading.Lock()

    def torch(self, name: str, *, shared: bool = False) -> Opened:
        """A file of torch.save; a `shared` one is read by many ranks."""
        return self._once(name, functools.partial(self._torch, shared=shared))

    def tensors(self, name: str) -> Opened:
        """A safetensors file; `state` is its `Content`."""
        return self._once(name, self._tensors)

    def text(self, name: str) -> str:
        path = inside(self.directory, name, "the file name")
        if name in self._facts:
            facts = self._facts[name]
            FileCheck(path, facts).require(0, facts.size)
        with reading(path):
            return read_regular(path, _LARGEST_TEXT).decode("utf-8")

    def _once(self, name: str, make: Callable[[str], Opened]) -> Opened:
        with self._lock:
            if name not in self._opened:
                if not inside(self.directory, name, "the file name").exists():
                    raise CheckpointError(f"{self.directory / name} is missing: the checkpoint is not whole")
                with reading(self.directory / name):
                    self._opened[name] = make(name)
            return self._opened[name]

    def _torch(self, name: str, shared: bool) -> Opened:
        path = self.directory / name
        if name not in self._facts:
            check = MappedCheck(path, FileFacts(path.stat().st_size, ()), shared=shared)
            return Opened(safe_load(path), check.require, check.place)
        file = CheckedFile(path, self._facts[name], shared=shared)
        return Opened(file.state, file.require, file.place)

    def _tensors(self, name: str) -> Opened:
        path = self.directory / name
        facts = self._facts.get(name) or FileFacts(path.stat().st_size, ())
        check = MappedCheck(path, facts)
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        check.blocks.require(0, min(8 + length, facts.size))
        return Opened(open_file(path), check.require, check.place)
