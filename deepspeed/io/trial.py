"""`Trial`: one way to read or write files in folders of users, and how long that takes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import FileError
from deepspeed.io.fast_file_writer import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.aio.open_file import locked_tensor
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder


@dataclass(frozen=True)
class Trial:
    """What one process does: `loops` times the same file, or a new one each time, in a folder of its own."""

    read: bool
    io_size: int
    block_size: int = 2**20
    queue_depth: int = 32
    io_parallel: int = 1
    single_submit: bool = False
    sequential_requests: bool = False
    engine: str = "aio_handle"
    loops: int = 3
    warmup_loops: int = 1
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False
    validate: bool = False
    gpu: bool = False
    use_gds: bool = False
    slow_bounce_buffer: bool = False
    use_accelerator_pin_memory: bool = False
    torch_legacy_save: bool = False
    fast_io_size: int = 2**26

    @property
    def files(self) -> int:
        """How many files there are at a time."""
        return self.loops + self.warmup_loops if self.different_file_each_iteration else 1

    @property
    def counted(self) -> int:
        """Loops whose time counts."""
        return self.loops + (self.warmup_loops if self.include_warmup_time else 0)

    def run(self, folder: str, device: int = 0, ready: Callable[[], Any] = lambda: None) -> float:
        """Seconds that the counted loops took; `ready` is called when everything is prepared."""
        paths = [str(Path(folder, f"{n}.bin")) for n in range(self.files)]
        pattern = torch.arange(256, dtype=torch.uint8).repeat(-(-self.io_size // 256))[: self.io_size]
        buffer, move = _bench(self, pattern, device)
        if self.read:
            for path in paths:
                _make_file(self, path, pattern)
            buffer.zero_()
        ready()
        began = time.perf_counter()
        for loop in range(-self.warmup_loops, self.loops):
            if loop == 0 and not self.include_warmup_time:
                began = time.perf_counter()
            move(paths[(loop + self.warmup_loops) % len(paths)])
        seconds = time.perf_counter() - began
        if self.validate:
            moved = buffer.cpu() if self.read else _content(self, paths[-1])
            if not torch.equal(moved, pattern):
                raise FileError(errno.EIO, "other bytes than expected were read or written", paths[-1])
        return seconds


def problem_of(trial: Trial) -> str | None:
    """Why a trial cannot be run as it is, in the words of the options: one that would do nothing is a problem, too."""
    aio = trial.engine.startswith("aio")
    rules = (
        (trial.gpu and get_accelerator().device_name() == "cpu", "--gpu: there is no device but the processor"),
        (trial.use_gds and not trial.gpu, "GPUDirect Storage needs --gpu"),
        (trial.use_gds and trial.engine != "aio_handle", "--use_gds needs --engine aio_handle"),
        (trial.slow_bounce_buffer and not (trial.gpu and aio), "--slow_bounce_buffer needs --gpu and an aio engine"),
        (trial.slow_bounce_buffer and trial.use_gds, "--slow_bounce_buffer and --use_gds exclude each other"),
        (trial.torch_legacy_save and aio, "--torch_legacy_save needs --engine torch_io or torch_fastio"),
        (trial.engine == "aio_basic" and trial.io_parallel > 1, "--io_parallel needs --engine aio_handle"),
    )
    return next((message for broken, message in rules if broken), None)


Move = Callable[[str], object]
"""Moves a buffer to a file, or the other way, once."""


def _bench(trial: Trial, pattern: Tensor, device: int) -> tuple[Tensor, Move]:
    """The buffer of a trial, filled, and what moves it."""
    if trial.use_accelerator_pin_memory:
        host = get_accelerator().pin_memory(pattern.clone())
    else:
        host = locked_tensor(trial.io_size, torch.uint8).copy_(pattern)
    if not trial.gpu:
        return host, ENGINES[trial.engine](trial, host)
    accelerator = get_accelerator()
    buffer = host.to(accelerator.device_name(device))
    if trial.use_gds or trial.slow_bounce_buffer:
        return buffer, ENGINES[trial.engine](trial, buffer)
    move = ENGINES[trial.engine](trial, host)

    def by_host(path: str) -> None:
        if not trial.read:
            host.copy_(buffer)
        move(path)
        if trial.read:
            buffer.copy_(host)
            accelerator.synchronize(device)

    return buffer, by_host


def _aio_handle(trial: Trial, buffer: Tensor) -> Move:
    op = GDSBuilder().load().gds_handle if trial.use_gds else AsyncIOBuilder().load().aio_handle
    overlap = not trial.sequential_requests
    handle = op(trial.block_size, trial.queue_depth, trial.single_submit, overlap, trial.io_parallel)
    begin = handle.async_pread if trial.read else handle.async_pwrite
    return lambda path: (begin(buffer, path), handle.wait())


def _aio_basic(trial: Trial, buffer: Tensor) -> Move:
    op = AsyncIOBuilder().load()
    call = op.aio_read if trial.read else op.aio_write
    numbers = (trial.block_size, trial.queue_depth, trial.single_submit, not trial.sequential_requests, False)
    return lambda path: call(buffer, path, *numbers)


def _torch_io(trial: Trial, buffer: Tensor) -> Move:
    if trial.read:
        return lambda path: buffer.copy_(torch.load(path))
    return lambda path: torch.save(buffer, path, _use_new_zipfile_serialization=not trial.torch_legacy_save)


def _torch_fastio(trial: Trial, buffer: Tensor) -> Move:
    if trial.read:
        return _torch_io(trial, buffer)
    overlap = not trial.sequential_requests
    numbers = (trial.block_size, trial.queue_depth, trial.single_submit, overlap, trial.io_parallel)
    config = FastFileWriterConfig(
        AsyncIOBuilder().load().aio_handle(*numbers), locked_tensor(trial.fast_io_size, torch.uint8)
    )

    def move(path: str) -> None:
        with FastFileWriter(path, config) as writer:
            file: Any = writer  # it has of a file what torch.save needs
            torch.save(buffer, file, _use_new_zipfile_serialization=not trial.torch_legacy_save)

    return move


ENGINES: dict[str, Callable[[Trial, Tensor], Move]] = {
    "aio_handle": _aio_handle,
    "aio_basic": _aio_basic,
    "torch_io": _torch_io,
    "torch_fastio": _torch_fastio,
}


def _make_file(trial: Trial, path: str, pattern: Tensor) -> None:
    """A file to read, of which the system holds nothing in memory."""
    if trial.engine.startswith("torch"):
        torch.save(pattern, path, _use_new_zipfile_serialization=not trial.torch_legacy_save)
    else:
        AsyncIOBuilder().load().aio_handle().sync_pwrite(pattern, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _content(trial: Trial, path: str) -> Tensor:
    """What a file says that was written."""
    if trial.engine.startswith("torch"):
        loaded: Tensor = torch.load(path)
        return loaded.cpu()
    return torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)


# ---- trials in folders: space looked at before, processes begun together, files removed after

Folder = tuple[str, int]
"""A folder to measure, and the device whose memory is moved."""

_PREPARED_S = 600.0


def speed(trial: Trial, folders: Sequence[Folder], processes: int = 1) -> float:
    """GB/s over all folders, with so many processes in each."""
    for folder, _ in folders:
        _require_space(folder, trial.io_size * trial.files * processes)
    with contextlib.ExitStack() as made:
        tasks = [
            (made.enter_context(own_folder(folder)), device) for folder, device in folders for _ in range(processes)
        ]
        seconds = [trial.run(*tasks[0])] if len(tasks) == 1 else _together(trial, tasks)
    return len(tasks) * trial.counted * trial.io_size / max(seconds) / 1e9


@contextlib.contextmanager
def own_folder(parent: str) -> Iterator[str]:
    """A new folder that only this user can look into, removed with everything in it."""
    try:
        made = tempfile.mkdtemp(prefix="ds_io-", dir=parent)
    except OSError as error:
        raise FileError(error.errno or 0, f"no folder can be made in it: {error.strerror}", parent) from error
    try:
        yield made
    finally:
        _remove(made)


def _remove(folder: str) -> None:
    """Remove a folder of ours, in which a request that nobody waits for any more may still make its file."""
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:  # the last of those requests makes the last file
            if error.errno != errno.ENOTEMPTY:
                raise


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: whatever was made is removed on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _together(trial: Trial, tasks: Sequence[Folder]) -> list[float]:
    """Each task in a process of its own, all of which begin to measure at the same moment."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(len(tasks), mp_context=context) as pool:
        barrier = manager.Barrier(len(tasks))
        futures = [pool.submit(_one, trial, folder, device, barrier) for folder, device in tasks]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in errors:
            if not isinstance(error, BrokenBarrierError):  # that is a neighbour of the one that failed
                raise error
        return [future.result() for future in futures]


def _one(trial: Trial, folder: str, device: int, barrier: Barrier) -> float:
    try:
        return trial.run(folder, device, lambda: barrier.wait(_PREPARED_S))
    except BaseException:
        barrier.abort()
        raise


def _require_space(folder: str, needed: int) -> None:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise FileError(error.errno or 0, f"it cannot be looked at: {error.strerror}", folder) from error
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and needed > free:
        raise FileError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free there", folder)


# ---- numbers of bytes as people write them

_UNITS = "KMGT"


def parse_size(text: str | int) -> int:
    """The number of bytes; K, M, G and T are powers of 1024. Any other text is an error of argparse that says why."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([{_UNITS}]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if found is None or isinstance(text, bool):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of bytes such as 4096, 64K, 1M or 1.5G")
    size = float(found[1]) * 1024 ** (_UNITS.find(found[2].upper()) + 1 if found[2] else 0)
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(f"{text!r} is {size:g} bytes; expected a whole number from 1 up")
    return int(size)


def show_size(size: int) -> str:
    """The shortest text that `parse_size` reads as this number."""
    for power in range(len(_UNITS), 0, -1):
        if size % 1024**power == 0:
            return f"{size // 1024**power}{_UNITS[power - 1]}"
    return str(size)
