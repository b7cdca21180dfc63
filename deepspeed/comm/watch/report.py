"""What a rank tells of itself when a collective does not complete, as it travels between ranks: plain values, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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
    """A recorded operation as it is told to other ranks."""
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
    """The report as JSON."""
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
