"""Trials in folders of users: space looked at before, several processes begun together, files removed after."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier, BrokenBarrierError
from types import FrameType

from deepspeed.errors import FileError
from deepspeed.io.trial import Trial

__all__ = ["Folder", "own_folder", "speed", "stopped_by_signals"]

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
