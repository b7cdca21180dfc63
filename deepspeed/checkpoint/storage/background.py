"""Saving while training goes on: a snapshot in host memory, then one thread that writes it.

[Note: snapshot] What is written must be what the tensors held when the save was asked for. So the caller waits for one
copy of every byte into host memory (page-locked where the tensors are on a device, which makes the copies run at the
speed of the bus), and for nothing else. The buffers are kept for the next snapshot, because getting fresh memory from
the system takes longer than the copy. Tensors that share memory do so in the snapshot.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.storage.durable import tensors_in
from deepspeed.errors import CheckpointError, DeepSpeedError


class Snapshot:
    """Copies of tensors in buffers of its own, which are used again after the next `begin`."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._used: list[tuple[tuple[int, bool], Tensor]] = []

    def begin(self) -> None:
        """What was taken before is not needed any more."""
        self._free.clear()  # of sizes that were not needed the last time
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used = []

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """One-dimensional host memory for a copy that the caller makes; page-locked where the job has a device."""
        pinned = get_accelerator().device_name() != "cpu"
        return self._buffer(numel * dtype.itemsize, pinned)[: numel * dtype.itemsize].view(dtype)

    def take(self, obj: Any) -> Any:
        """The same containers with copies of the tensors on the host; returns when the copies are done."""
        spans: dict[int, list[int]] = {}  # storage → first and last byte that a tensor of it covers
        for tensor in tensors_in(obj):
            if not _has_memory(tensor):
                continue
            start, stop = _bytes(tensor)
            span = spans.setdefault(tensor.untyped_storage().data_ptr(), [start, stop])
            span[:] = min(span[0], start), max(span[1], stop)
        made: dict[int, Tensor] = {}
        copied = self._copy(obj, spans, made)
        if any(tensor.device.type != "cpu" for tensor in tensors_in(obj)):
            get_accelerator().synchronize()
        return copied

    def close(self) -> None:
        """Give the memory back."""
        self._free.clear()
        self._used.clear()

    def _copy(self, obj: Any, spans: Mapping[int, list[int]], made: dict[int, Tensor]) -> Any:
        if isinstance(obj, Tensor):
            return self._tensor(obj, spans, made)
        if isinstance(obj, Mapping):
            items = [(key, self._copy(value, spans, made)) for key, value in obj.items()]
            copy = OrderedDict(items) if isinstance(obj, OrderedDict) else dict(items)
            if isinstance(obj, OrderedDict):
                vars(copy).update(vars(obj))  # a state dict carries its metadata so
            return copy
        if isinstance(obj, (list, tuple)) and type(obj) in (list, tuple):
            return type(obj)(self._copy(value, spans, made) for value in obj)
        return obj

    def _tensor(self, tensor: Tensor, spans: Mapping[int, list[int]], made: dict[int, Tensor]) -> Tensor:
        source = tensor.detach()
        if not _has_memory(source):
            return source.to("cpu", copy=True)
        storage = source.untyped_storage()
        first, last = spans[storage.data_ptr()]
        if storage.data_ptr() not in made:
            on_device = source.device.type != "cpu"
            buffer = self._buffer(last - first, on_device)
            flat = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage, first, (last - first,), (1,))
            buffer.copy_(flat, non_blocking=on_device)
            made[storage.data_ptr()] = buffer
        # Spans begin at the first byte of a tensor, so the offset within is whole elements unless dtypes are mixed.
        start, stop = _bytes(source)
        piece = made[storage.data_ptr()][start - first : stop - first]
        if piece.storage_offset() % source.element_size():
            piece = piece.clone()
        return piece.view(source.dtype).as_strided(source.shape, source.stride())

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        key = (size, pinned)
        kept = self._free.get(key)
        if kept:
            buffer = kept.pop()
        elif pinned:
            buffer = get_accelerator().pin_empty(size, dtype=torch.uint8)
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
        self._used.append((key, buffer))
        return buffer


def _has_memory(tensor: Tensor) -> bool:
    """Its values are bytes of a storage as they stand: not sparse, not lazily conjugated or negated."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers and the one after its last."""
    start = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    return start * tensor.element_size(), (start + count) * tensor.element_size()


class Background:
    """At most one job at a time in a thread; its error is raised by the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._what = ""

    @property
    def busy(self) -> bool:
        """A job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, what: str, job: Callable[[], object]) -> None:
        """Run `job` in a thread, after the one before it; raises that one's error instead of starting.

        `what`: words for the job in error messages.
        """
        self.wait()
        self._what = what

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._error = error
                if not isinstance(error, Exception):
                    raise

        # Not a daemon: a program that ends lets its last checkpoint be written.
        self._thread = threading.Thread(target=run, name="checkpoint-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job and raise its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, DeepSpeedError):
            raise CheckpointError(f"{self._what}, which ran in the background, failed: {error}") from error
        if error is not None:
            raise error
