"""`EventFile`: records as lines of JSON in a file of this rank, written by a thread, bounded in size.

[Note: files of events] `FILE.rank00003.jsonl` is appended to. At `max_file_bytes` it becomes `FILE.rank00003.<n>.jsonl`
with a number that grows, and of those the oldest goes. A file that another engine or job is writing is left to it:
the next one is `FILE-2.rank00003.jsonl`. Each file begins with the record that describes the run. A line is at most
`LONGEST` bytes long, so that a reader can skip what is longer. A kill may cut the last line off: the next writer begins
a new one, and readers leave out lines that are no JSON.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import logger

SCHEMA = 1
LONGEST = 1 << 18
_WAITING = 10_000  # records that may wait for the disk
_PAUSE = 0.2  # seconds: lines that come close together are written together

Record = Mapping[str, Any]


def plain(value: Any) -> Any:
    """A value as JSON knows it: what is not finite becomes its name, since JSON has no such number."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def _line(record: Record) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(plain(record), separators=(",", ":"))
    if len(text) >= LONGEST:
        text = json.dumps({"kind": "too long", "t": record.get("t"), "of": record.get("kind")})
    return text.encode() + b"\n"


class EventFile:
    """Appends records; `put` takes a function that makes one, which the writing thread calls."""

    def __init__(self, file: Path, rank: int, head: Record, *, limit: int, keep: int) -> None:
        self._rank, self._limit, self._keep = rank, limit, keep
        self._head = {"kind": "run", "schema": SCHEMA, "rank": rank, **head}
        self._pid = os.getpid()
        self._waiting: deque[Callable[[], Record | None]] = deque(maxlen=_WAITING)
        self._complained = False
        self._ended = threading.Event()
        self._wake = threading.Event()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = self._open_free(file)
        except OSError as error:
            raise DeepSpeedConfigError(
                f"events.file (or DS_EVENTS) is {str(file)!r:.500}, where rank {rank} cannot write ({error}); give a "
                "path in a folder that every rank can write to",
                path="events.file",
            ) from error
        self._size = os.fstat(self._descriptor).st_size
        self.tell("run", **{name: value for name, value in self._head.items() if name != "kind"})
        self._thread = threading.Thread(target=self._live, name="deepspeed-events", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], Record | None]) -> None:
        """Write what `make` returns, soon; None is nothing. Returns at once."""
        self._waiting.append(make)
        if not self._wake.is_set():
            self._wake.set()

    def tell(self, kind: str, **values: Any) -> None:
        """Write a record of this moment."""
        record = {"kind": kind, "t": round(time.time(), 3), **values}
        self.put(lambda: record)

    def close(self) -> None:
        """Write what is left; closing twice is harmless, and so is closing in a child of the writing process."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout=10.0)

    def _open_free(self, file: Path) -> tuple[Path, int]:
        """The first of the names that no process is writing."""
        stem = file.name.removesuffix(".jsonl") or "events"
        number = 1
        while True:
            name = stem if number == 1 else f"{stem}-{number}"
            path = file.with_name(f"{name}.rank{self._rank:05d}.jsonl")
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            if _lock(descriptor):
                _end_line(descriptor)
                return path, descriptor
            os.close(descriptor)
            number += 1

    # ---- the thread

    def _live(self) -> None:
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            self._write()
            self._ended.wait(_PAUSE)
        self._write()
        os.close(self._descriptor)

    def _write(self) -> None:
        data = bytearray()
        while self._waiting:
            make, line = self._waiting.popleft(), b""
            with self._survives():  # what is watched may end at any time
                record = make()
                line = b"" if record is None else _line(record)
            if self._size + len(data) + len(line) > self._limit:
                self._append(bytes(data))
                with self._survives():
                    self._rotate()
                data.clear()
            data += line
        self._append(bytes(data))

    @contextmanager
    def _survives(self) -> Iterator[None]:
        """Training does not end for its events: the first error is logged, and the next record is tried again."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "events.file: %s cannot take an event (%s: %s); some are lost, and training goes on",
                    *(self.path, type(error).__name__, error),
                )

    def _append(self, data: bytes) -> None:
        with self._survives():
            while data:
                written = os.write(self._descriptor, data)
                self._size += written
                data = data[written:]

    def _rotate(self) -> None:
        """Put the file aside and begin a new one."""
        aside = sorted((number, path) for path in self._aside() if (number := _number(path)) is not None)
        following = aside[-1][0] + 1 if aside else 1
        os.rename(self.path, self.path.with_suffix(f".{following}.jsonl"))
        fresh = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        _lock(fresh)
        os.close(self._descriptor)
        self._descriptor, self._size = fresh, 0
        for _, path in aside[: max(len(aside) + 2 - self._keep, 0)]:
            path.unlink(missing_ok=True)
        head = _line({**self._head, "t": round(time.time(), 3), "goes_on": True})
        self._size += os.write(fresh, head)

    def _aside(self) -> list[Path]:
        return list(self.path.parent.glob(f"{self.path.name.removesuffix('.jsonl')}.*.jsonl"))


def _number(path: Path) -> int | None:
    """The number of a file that was put aside."""
    word = path.name.removesuffix(".jsonl").rpartition(".")[2]
    return int(word) if word.isdigit() else None


def _lock(descriptor: int) -> bool:
    """Whether the file is this writer's; where the system or the file system has no locks, it is."""
    try:
        import fcntl  # not on every system

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError):
        return True
    return True


def _end_line(descriptor: int) -> None:
    """A line that a killed writer left open ends here."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
