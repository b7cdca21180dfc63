"""Output of ranks on its way to the user: passed on at once, labelled or folded, its last lines remembered.

[Note: output] A rank writes into a pipe, or into a pseudo-terminal where the launcher itself writes to a terminal, so
that progress bars and colours look as if there were no launcher. A thread per channel passes the bytes on. Only whole
lines are written, so that those of several ranks do not mix; the beginning of a line waits for its rest a moment.
Where stdout and stderr of the launcher are the same file, both of a rank go through one channel and keep their order.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepspeed.launcher.binding import ranges
from deepspeed.launcher.protocol import Link, RelayPlan

LINES = 20  # remembered per channel
_LINE_BYTES = 2000  # of a line that is remembered
_PATIENCE = 0.02  # seconds that the beginning of a line waits for its rest
_SHAPED_PATIENCE = 0.5  # the same, where what is written has to be whole lines
_CHUNK = 2**16
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


class LastLines:
    """The last lines of a stream of bytes; of a line that was redrawn, what could be seen last."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take more of the stream."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._lines.extend(map(_visible, whole[-LINES:]))
        # Nothing before the last redraw of an unfinished line is needed again.
        self._rest = rest[rest.rfind(b"\r", 0, max(0, len(rest) - 1)) + 1 :][-4 * _LINE_BYTES :]

    def lines(self) -> list[str]:
        """The lines, an unfinished one included; blank lines at either end are left out."""
        found = [*self._lines, *([_visible(self._rest)] if self._rest else [])][-LINES:]
        filled = [at for at, line in enumerate(found) if line.strip()]
        return found[filled[0] : filled[-1] + 1] if filled else []


def _visible(line: bytes) -> str:
    text = next((part for part in reversed(line.split(b"\r")) if part), b"")[:_LINE_BYTES]
    return _ESCAPES.sub("", text.decode(errors="replace"))


def last_lines(path: str, start: int = 0) -> list[str]:
    """The last lines of a file, not counting what was there before byte `start`."""
    tail = LastLines()
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LINES * _LINE_BYTES))
        tail.feed(file.read())
    return tail.lines()


class OutputPipe:
    """One way from a rank to a file descriptor of ours: give `inlet` to the rank, then `start`.

    `shape` gets what would be written, whole lines as far as patience goes, and says what is written instead.
    """

    def __init__(
        self, target: int, stop: int, lock: threading.Lock, shape: Callable[[bytes], bytes] | None = None
    ) -> None:
        self.target = target
        self._shape = shape
        self._patience = _PATIENCE if shape is None else _SHAPED_PATIENCE
        self.tail = LastLines()
        self._stop = stop
        self._lock = lock
        self.terminal = shape is None and os.isatty(target)
        self._source, self.inlet = os.openpty() if self.terminal else os.pipe()
        os.set_blocking(self._source, False)
        if self.terminal:
            _leave_bytes_alone(self.inlet)
            self.resize()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resize(self) -> None:
        """Give the rank's terminal the size of ours."""
        if self.terminal:
            with suppress(OSError):  # ours was closed
                size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, size)

    def start(self) -> None:
        """Pass on what comes until the rank's side is closed, or until `stop` is readable and nothing is left."""
        os.close(self.inlet)
        self._thread.start()

    def busy(self) -> bool:
        """True until everything has been passed on."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._pump()
        except OSError:
            # Our side cannot be written any more (the reader is gone, the disk is full). Closing the source lets the
            # rank find that out with its next write, as it would without a launcher.
            pass
        finally:
            os.close(self._source)

    def _pump(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        pending = b""
        due = math.inf  # when the beginning of a line has waited long enough
        while True:
            wait = None if due == math.inf else max(0.0, due - time.monotonic()) * 1000
            ready = {descriptor for descriptor, _ in poll.poll(wait)}
            chunk = self._read() if self._source in ready else None
            if chunk:
                self.tail.feed(chunk)
                pending += chunk
                cut = len(pending) if len(pending) > _CHUNK else max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
                if cut:
                    self._write(pending[:cut])
                    pending, due = pending[cut:], math.inf
                if pending:
                    due = min(due, time.monotonic() + self._patience)
            ended = chunk == b"" or (chunk is None and self._stop in ready)
            if pending and (ended or time.monotonic() >= due):
                self._write(pending)
                pending, due = b"", math.inf
            if ended:
                return

    def _read(self) -> bytes | None:
        """What is there; nothing at the end of the stream; None if nothing is there yet."""
        try:
            return os.read(self._source, _CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:  # how a pseudo-terminal says that its other side is closed
                return b""
            raise

    def _write(self, data: bytes) -> None:
        write_all(self.target, data if self._shape is None else self._shape(data), self._lock)


def write_all(target: int, data: bytes, lock: threading.Lock) -> None:
    """Write everything, and nothing of others in between."""
    view = memoryview(data)
    with lock:
        while view:
            try:
                view = view[os.write(target, view) :]
            except BlockingIOError:  # somebody made the shared descriptor non-blocking
                select.select([], [target], [])


def _leave_bytes_alone(terminal: int) -> None:
    """No translation of line ends and no echo: our own terminal does all that."""
    settings = termios.tcgetattr(terminal)
    settings[1] &= ~termios.OPOST
    settings[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(terminal, termios.TCSANOW, settings)


# ---- lines of many ranks

WINDOW = 0.25  # seconds that a line waits for equal ones of other ranks
_LABEL = re.compile(rb"\[(\d+)\] ")
_END = re.compile(rb"\r\n|\n|\r")


def labelled(data: bytes, label: bytes) -> bytes:
    """Every line with the label before it; a line that is redrawn becomes several, since others come in between."""
    lines = _END.split(data)
    if not lines[-1]:
        lines.pop()
    return b"".join(label + line + b"\n" for line in lines)


def split_label(line: bytes) -> tuple[int | None, bytes]:
    """ "[3] text" → (3, "text"); a line that no rank wrote → (None, the line)."""
    match = _LABEL.match(line)
    return (None, line) if match is None else (int(match[1]), line[match.end() :])


@dataclass
class _Line:
    text: bytes
    number: int
    due: float
    ranks: set[int] = field(default_factory=set)


class LineFolder:
    """Holds each line a moment, and writes it once with the ranks that said it; lines of a rank keep their order."""

    def __init__(self, world: int, write: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._write = write
        self._clock = clock
        self._lines: deque[_Line] = deque()
        self._open: dict[bytes, _Line] = {}  # the newest line with a text
        self._last: dict[int, int] = {}  # of each rank, the number of its last line
        self._count = 0
        self._lock = threading.Lock()

    def add(self, rank: int, text: bytes) -> None:
        """A line of a rank, without its end."""
        with self._lock:
            found = self._open.get(text)
            # A rank joins a line only behind its own last one.
            if found is None or found.number <= self._last.get(rank, -1):
                found = self._open[text] = _Line(text, self._count, self._clock() + WINDOW)
                self._lines.append(found)
                self._count += 1
            found.ranks.add(rank)
            self._last[rank] = found.number
            self._write_due(self._clock())

    def flush(self, everything: bool = False) -> float | None:
        """Write what has waited long enough; seconds until the next line is due, None if nothing waits."""
        with self._lock:
            now = self._clock()
            self._write_due(float("inf") if everything else now)
            return max(0.0, self._lines[0].due - now) if self._lines else None

    def _write_due(self, now: float) -> None:
        while self._lines and (self._lines[0].due <= now or len(self._lines[0].ranks) == self._world):
            line = self._lines.popleft()
            if self._open.get(line.text) is line:
                del self._open[line.text]
            self._write(b"[" + ranges(line.ranks).encode() + b"] " + line.text + b"\n")


class HostOutput:
    """Shapes lines of links for stdout and stderr; with folding, a thread of its own writes what has waited."""

    def __init__(self, plan: RelayPlan) -> None:
        self.locks = {1: threading.Lock(), 2: threading.Lock()}
        self._plain = plan.style == "plain"
        self._by_host = plan.style == "host"
        names = "|".join(map(re.escape, plan.hosts))
        self._named = re.compile(rf"(?:{names}): ".encode()) if names else None
        self._folds: dict[int, LineFolder] = {}
        self._closed = threading.Event()
        if plan.style == "fold":
            self._folds = {n: LineFolder(plan.world, partial(write_all, n, lock=self.locks[n])) for n in (1, 2)}
            threading.Thread(target=self._flush, daemon=True).start()

    def shaped(self, link: Link, target: int, data: bytes) -> bytes:
        """What is written at once of whole lines that came from a link."""
        if self._plain or not data:
            return data
        out: list[bytes] = []
        for line in data.split(b"\n")[: -1 if data.endswith(b"\n") else None]:
            named = self._named.match(line) if self._named is not None else None
            rank, text = (None, line) if self._by_host else split_label(line[named.end() :] if named else line)
            if rank is None:
                out.append(f"{link.host}: ".encode() + line if link.host else line)
            elif self._folds:
                self._folds[target].add(rank, text)
            else:
                out.append(b"[%d] " % rank + text)
        return b"".join(line + b"\n" for line in out)

    def close(self) -> None:
        """Write everything that waits."""
        self._closed.set()
        with suppress(OSError):
            for fold in self._folds.values():
                fold.flush(everything=True)

    def _flush(self) -> None:
        with suppress(OSError):  # nobody reads any more: the channels notice it, too
            while not self._closed.wait(WINDOW / 4):
                for fold in self._folds.values():
                    fold.flush()
