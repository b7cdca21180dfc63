"""The other ranks of this host, examined without their help: call logs, processes, and stacks by a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import signal
import time
from dataclasses import dataclass

from deepspeed.comm.processes import has_ended, host_key, host_name, process_state
from deepspeed.comm.watch.report import CallLog, RankReport, open_log, progress_of, read_calls, read_end
from deepspeed.comm.watch.store import WatchStore
from deepspeed.comm.watch.threads import place_in

_STACK_BYTES = 64 << 10
_STACK_WAIT = 0.5  # seconds that a process gets to write its stacks
_FILE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in ')


class Stacks:
    """A signal on which this process writes the stacks of its threads, also while no Python code can run.

    It stays to the end of the process: without the handler the signal would end it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.fd = os.memfd_create("deepspeed-stacks")
        wanted = signal.SIGRTMAX - 3
        if signal.getsignal(wanted) is signal.SIG_DFL:
            faulthandler.register(wanted, file=self.fd, all_threads=True, chain=False)
            self.number = int(wanted)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of this host."""

    rank: int
    pid: int
    started: str
    calls: mmap.mmap
    stacks: str
    number: int | None

    def look(self) -> str:
        """`gone`, `stopped` or `runs`."""
        if has_ended(self.pid, self.started):
            return "gone"
        found = process_state(self.pid)
        return "stopped" if found is not None and found[0] in "Tt" else "runs"

    def report(self, *, silent: bool = False) -> RankReport:
        """What can be known of it from outside; with `silent` it has been asked and did not answer."""
        groups = progress_of(read_calls(self.calls))
        words, state, main = read_end(self.calls), self.look(), ""
        conditions = {
            "gone": f"is dead: its process {self.pid} on {host_name()} was killed or crashed",
            "stopped": f"is stopped: its process {self.pid} on {host_name()} got SIGSTOP or is being debugged",
            "runs": "",
        }
        # One that said how it ends has ended, also while its process is on its way out: connections break before that.
        condition = "" if words else conditions[state]
        if state == "runs" and silent and not words:
            main = self._main()
            condition = f"does not answer: native code holds the interpreter of its process {self.pid}"
        return RankReport(
            self.rank,
            host_name(),
            ended=words,
            condition=condition,
            main=main,
            groups=groups,
        )

    def _main(self) -> str:
        """Where its main thread is, by its own signal handler."""
        if self.number is None:
            return ""
        with contextlib.suppress(OSError), open(self.stacks, "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(self.pid, self.number)
            until, text = time.monotonic() + _STACK_WAIT, b""
            while time.monotonic() < until and not text.endswith(b"\n"):
                time.sleep(0.05)
                text = os.pread(file.fileno(), _STACK_BYTES, before)
            return _innermost(text.decode(errors="replace"))
        return ""


def _innermost(text: str) -> str:
    """The user's line out of stacks that faulthandler wrote; the main thread is the one that got the signal."""
    _, _, current = text.partition("Current thread")
    frames = [(found["file"], int(found["line"])) for found in _FILE.finditer(current)]
    return place_in(frames)


class Neighbours:
    """The ranks of this host, as they come; this rank publishes where its call log is."""

    def __init__(self, store: WatchStore, rank: int, call_log: CallLog, stacks: Stacks) -> None:
        self._store = store
        self._rank = rank
        self._key = host_key()
        self._read = 0
        self.found: dict[int, Neighbour] = {}
        own = process_state(os.getpid())
        assert own is not None, "this process is in /proc"
        hello = {
            "rank": rank, "pid": os.getpid(), "started": own[1],
            "log": call_log.fd, "stacks": stacks.fd, "number": stacks.number,
        }  # fmt: skip
        store.set(f"host/{self._key}/{store.add(f'hosts/{self._key}')}", json.dumps(hello))

    def find_new(self) -> None:
        """Open the call logs of ranks that have come since."""
        while (raw := self._store.find(f"host/{self._key}/{self._read + 1}")) is not None:
            self._read += 1
            hello = json.loads(raw)
            if hello["rank"] == self._rank:
                continue
            folder = f"/proc/{hello['pid']}/fd"
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is not ours to look at
                calls = open_log(f"{folder}/{hello['log']}")
                self.found[hello["rank"]] = Neighbour(
                    hello["rank"], hello["pid"], hello["started"], calls, f"{folder}/{hello['stacks']}", hello["number"]
                )

    def close(self) -> None:
        """Release the call logs."""
        for neighbour in self.found.values():
            neighbour.calls.close()
        self.found.clear()
