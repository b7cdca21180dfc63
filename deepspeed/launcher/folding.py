"""Lines of many ranks for one reader: labelled with their rank, and equal ones of several ranks shown once."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed.launcher.binding import ranges

__all__ = ["Fold", "labelled", "split_label"]

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


class Fold:
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
