"""What a rank tells of itself when a collective does not complete, as it travels between ranks: plain values, JSON.

[Note: the call log] A rank that is killed, aborted by its backend, stopped, or held in native code cannot answer.
So each rank logs what it enters in an anonymous memory file, which the other ranks of its host map when they start: the
memory stays as long as one of them has it, and no file has to be removed. An operation is two words: its slot (sequence
number and number of its description) and the count of slots. Descriptions are few and written once, as text.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed.comm.records import Entry, read, shown_path


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One operation that a rank entered. `title` is the group's name for people, `group` the one all ranks share.

    `counted` tells whose number `sequence` is: the dispatcher's, or the backend's for a call of torch.distributed.
    """

    group: str
    title: str
    sequence: int
    op: str
    p2p: bool = False
    counted: str = "dispatcher"
    shape: str = ""
    numel: int = 0
    dtype: str | None = None
    peer: int | None = None
    label: str | None = None
    place: str = ""
    launched: bool = False
    """The call returns before the operation is done, and nobody waits inside of it."""

    @property
    def key(self) -> tuple[str, bool, str, int]:
        """What makes calls of several ranks the same one."""
        return self.group, self.p2p, self.counted, self.sequence

    def __str__(self) -> str:
        label = f" of `{self.label}`" if self.label else ""
        return f"{self.op} {self.sequence}{label} on group {self.title}"


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A thread of a rank is inside a call; `ranks` are the group's. `place` is the line of the user's code."""

    call: CollectiveCall
    ranks: tuple[int, ...]
    seconds: float
    place: str


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a rank is in one group: by the dispatcher's count, by the backend's, and the calls it entered last."""

    entered: int | None = None
    position: int | None = None
    calls: tuple[CollectiveCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank. `condition` is empty where the rank tells this itself; else it says what others saw of it."""

    rank: int
    host: str = ""
    asked: int = 0
    ended: str = ""
    condition: str = ""
    main: str = ""
    waits: tuple[WaitingCall, ...] = ()
    groups: dict[str, GroupProgress] = field(default_factory=dict)
    stacks: str = ""
    seen: dict[int, RankReport] = field(default_factory=dict)


def call_of(entry: Entry) -> CollectiveCall:
    """A recorded operation as it is reported to other ranks."""
    record = read(entry)
    return CollectiveCall(
        group=record.group,
        title=entry[2].title,
        sequence=record.sequence,
        op=record.op,
        p2p=record.p2p,
        shape=record.what.rpartition(" (")[0],
        numel=record.bytes // entry[4].itemsize if entry[4] is not None else 0,
        dtype=record.dtype,
        peer=record.peer,
        label=record.label,
        place=f"{shown_path(record.file)}:{record.line}",
    )


def as_text(report: RankReport) -> str:
    return json.dumps(asdict(report))


def from_text(text: str | bytes) -> RankReport:
    """A report out of its JSON; ValueError, KeyError or TypeError for anything else."""
    return _report(json.loads(text))


def _report(raw: dict[str, Any]) -> RankReport:
    groups = {
        name: GroupProgress(
            value["entered"], value["position"], tuple(CollectiveCall(**call) for call in value["calls"])
        )
        for name, value in raw["groups"].items()
    }
    waits = tuple(
        WaitingCall(CollectiveCall(**wait["call"]), tuple(wait["ranks"]), wait["seconds"], wait["place"])
        for wait in raw["waits"]
    )
    seen = {int(rank): _report(value) for rank, value in raw["seen"].items()}
    return RankReport(**{**raw, "groups": groups, "waits": waits, "seen": seen})


SLOTS = 64
SIZE = 256 << 10
_END = 2 << 10  # bytes at the end of the memory, for why the rank has ended
_MAGIC = 0x64732D626F780001
_COUNT, _TEXT_END, _END_LENGTH, _FIRST = 1, 2, 3, 4  # indices of 8-byte words
_TEXT = 1024  # where descriptions begin, in bytes
_ID_BITS = 20


class CallLog:
    """This rank's call log; others open `fd`. Made only where there are memory files (Linux)."""

    __slots__ = ("_count", "_known", "_map", "_text", "_words", "fd")

    def __init__(self) -> None:
        self.fd = os.memfd_create("deepspeed-calls")
        os.ftruncate(self.fd, SIZE)
        self._map = mmap.mmap(self.fd, SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._words[_TEXT_END] = _TEXT
        self._words[0] = _MAGIC
        self._known: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._text = _TEXT
        self._count = 0

    def note(self, entry: Entry) -> None:
        """Write down that this operation was entered; on the path of every collective."""
        sequence, operation, group, shape, dtype, label, code, instruction, peer = entry
        # A code object's own hash walks its constants; its address is as good while the table holds it.
        key = (operation, group, shape, dtype, label, id(code), instruction, peer)
        found = self._known.get(key)
        if found is None:
            found = self._describe(key, entry)
        count = self._count
        self._count = count + 1
        words = self._words
        words[_FIRST + count % SLOTS] = (sequence << _ID_BITS) | found[0]
        words[_COUNT] = count + 1

    def write_end(self, text: str) -> None:
        """Write why this rank ends."""
        raw = text.encode()[:_END]
        self._map[SIZE - _END : SIZE - _END + len(raw)] = raw
        self._words[_END_LENGTH] = len(raw)

    def close(self) -> None:
        """Release the memory; ranks that have mapped it keep it."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def _describe(self, key: tuple[Any, ...], entry: Entry) -> tuple[int, Any]:
        number = len(self._known) + 1
        line = json.dumps(asdict(replace(call_of(entry), sequence=0))).encode() + b"\n"
        if self._text + len(line) > SIZE - _END or number >= 1 << _ID_BITS:
            return 0, None  # no room: the log says that something was entered, not what it was
        self._map[self._text : self._text + len(line)] = line
        self._text += len(line)
        self._words[_TEXT_END] = self._text
        self._known[key] = found = (number, entry[6])
        return found


def open_log(path: str) -> mmap.mmap:
    """Another rank's call log, by the path of its descriptor; OSError or ValueError where there is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if int.from_bytes(found[:8], "little") != _MAGIC:
        found.close()
        raise ValueError(f"{path} is not a call log")
    return found


def _word(log: mmap.mmap, index: int) -> int:
    return int.from_bytes(log[8 * index : 8 * index + 8], "little")


def read_calls(log: mmap.mmap) -> list[CollectiveCall]:
    """The operations in a call log, oldest first, without those whose description had no room."""
    lines = log[_TEXT : _word(log, _TEXT_END)].splitlines()
    count = _word(log, _COUNT)
    found = []
    for number in range(max(0, count - SLOTS), count):
        slot = _word(log, _FIRST + number % SLOTS)
        description = slot & ((1 << _ID_BITS) - 1)
        if 0 < description <= len(lines):
            found.append(replace(CollectiveCall(**json.loads(lines[description - 1])), sequence=slot >> _ID_BITS))
    return found


def read_end(log: mmap.mmap) -> str:
    """Why the rank has ended; empty if it did not write that."""
    return log[SIZE - _END : SIZE - _END + _word(log, _END_LENGTH)].decode(errors="replace")


def progress_of(calls: list[CollectiveCall]) -> dict[str, GroupProgress]:
    """How far a rank was in each group, by its last calls."""
    found: dict[str, GroupProgress] = {}
    for call in calls:
        before = found.get(call.group, GroupProgress())
        entered = before.entered if call.p2p else max(call.sequence, before.entered or 0)
        found[call.group] = GroupProgress(entered, None, (*before.calls, call))
    return found
