"""What a user sees of many hosts: lines as they come, with the rank or host before them, or folded where equal."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from functools import partial

from deepspeed.launcher.folding import WINDOW, Fold, split_label
from deepspeed.launcher.output import write_all
from deepspeed.launcher.relay_plan import Link, RelayPlan

__all__ = ["Printer"]


class Printer:
    """Shapes lines of links for stdout and stderr; with folding, a thread of its own writes what has waited."""

    def __init__(self, plan: RelayPlan) -> None:
        self.locks = {1: threading.Lock(), 2: threading.Lock()}
        self._plain = plan.style == "plain"
        self._by_host = plan.style == "host"
        names = "|".join(map(re.escape, plan.hosts))
        self._named = re.compile(rf"(?:{names}): ".encode()) if names else None
        self._folds: dict[int, Fold] = {}
        self._closed = threading.Event()
        if plan.style == "fold":
            self._folds = {n: Fold(plan.world, partial(write_all, n, lock=self.locks[n])) for n in (1, 2)}
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
