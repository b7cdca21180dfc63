"""What the processes of a job tell each other: plans from the launcher, and messages from ranks on other hosts.

[Note: messages] ssh, pdsh, mpirun and srun all carry stderr line by line and little else in common. So a message is
lines that begin with a separator that no program prints and the job's token, and the launcher takes them out again.
They are short, since Slurm and MPI may cut long lines and mix their parts with those of other ranks.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from deepspeed.launcher.environment import mask_command
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.hosts import Slots
from deepspeed.log import logger


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """The `local` ranks of one node, of which the first is rank `first`; they meet the others at `master`."""

    first: int
    local: int
    world: int
    node: int
    nodes: int
    master: tuple[str, int]

    @classmethod
    def of(cls, world: Slots, host: str, master: tuple[str, int]) -> NodePlacement:
        """Of a host: ranks are numbered host by host, in the order of the slots."""
        hosts = list(world)
        node = hosts.index(host)
        return cls(
            first=sum(len(world[before]) for before in hosts[:node]),
            local=len(world[host]),
            world=sum(map(len, world.values())),
            node=node,
            nodes=len(hosts),
            master=master,
        )

    def environments(self) -> list[dict[str, str]]:
        """The variables of each rank."""
        common = {
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
            "WORLD_SIZE": self.world,
            "CROSS_RANK": self.node,
            "CROSS_SIZE": self.nodes,
            "LOCAL_SIZE": self.local,
            "LOCAL_WORLD_SIZE": self.local,  # the same, as torch's own tools call it
        }
        return [
            {name: str(value) for name, value in {**common, "RANK": self.first + number, "LOCAL_RANK": number}.items()}
            for number in range(self.local)
        ]


RETIRE = 255  # the byte, beside those of signals, that lets the ranks make way for a new start of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: `environment` is added to that of the guard, `cores` limits it, `log` takes its output."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    log: str | None = None

    @property
    def shown(self) -> str:
        """The command as messages show it, without secrets."""
        return shlex.join(mask_command(self.command))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """All ranks of one node; `forward_to_groups` passes signals on to a rank's children too.

    `relay` is the value of `RELAY_VARIABLE`: who failed first of all nodes is told by a launcher that reads along.
    """

    program: ClassVar[str] = "guard"
    ranks: tuple[RankPlan, ...]
    host: str = field(default_factory=socket.gethostname)
    log_level: str = "info"
    pid_file: str | None = None
    forward_to_groups: bool = False
    relay: str = ""


def log_files(folder: str, ranks: Sequence[int]) -> Mapping[int, str]:
    """Rank → the file for its output; empty if it is not asked for."""
    if folder == "None":
        return {}
    path = Path(folder).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {folder}: the folder cannot be made: {error}") from error
    stamp = time.strftime("%Y%m%d%H%M%S")
    logger.info("the output of each rank is in %s", path / f"{stamp}_rank*.log")
    return {rank: str(path / f"{stamp}_rank{rank}.log") for rank in ranks}


# plain: lines as they come; rank: each with its rank; fold: equal lines of several ranks once; host: with the host
Style = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One program that starts ranks elsewhere: ssh to the one host, or mpirun to all of them.

    `opening` is written to its stdin, which then stays open and takes signals as bytes; empty: it has no stdin, and
    is only told to end. `forwards`: a signal sent to the program itself reaches the ranks.
    """

    host: str  # empty if there are several behind it
    command: Sequence[str]
    opening: bytes = b""
    forwards: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"host {self.host}" if self.host else Path(self.command[0]).name


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """All links of a job of `world` ranks; `hosts` are the names that a program puts before lines itself.

    `independent`: the links are no parts of one job, so that the others go on when one fails. `again`: seconds until
    a job that is `elastic` tries a lost host again.
    """

    program: ClassVar[str] = "relay"
    links: tuple[Link, ...]
    world: int
    token: str
    style: Style = "plain"
    hosts: tuple[str, ...] = ()
    log_level: str = "info"
    pid_file: str | None = None
    independent: bool = False
    elastic: bool = False
    again: float = 15.0


# ---- plans as bytes


def framed(data: bytes) -> bytes:
    """Bytes with their length before them, for `receive`."""
    return len(data).to_bytes(8, "big") + data


def receive(descriptor: int) -> bytes:
    """What was framed, and not a byte more; nothing if the other end is closed before."""
    return _exactly(descriptor, int.from_bytes(_exactly(descriptor, 8), "big"))


def _exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(descriptor, min(count - len(data), 2**20))
        if not more:
            return b""
        data += more
    return data


# ---- messages between lines of output

RELAY_VARIABLE = "DEEPSPEED_RELAY"  # in the environment of what starts ranks: that a launcher elsewhere reads along
_MARK = b"\x1e"
_PIECE = 600


@dataclass(frozen=True, slots=True)
class RelaySetting:
    """The token of a job whose output is read by a launcher elsewhere, and whether lines tell their rank.

    Without a token nothing is told between the lines: whoever starts the ranks speaks for itself.
    """

    token: str
    labels: bool

    def __str__(self) -> str:
        return f"{self.token}:{'rank' if self.labels else 'plain'}"

    @classmethod
    def parse(cls, value: str) -> RelaySetting | None:
        """From the variable; None without one."""
        token, _, style = value.partition(":")
        return cls(token, style == "rank") if value else None


def labels_only(value: str) -> str:
    """The variable's value for ranks that get labels as it says, and of which no launcher elsewhere is told."""
    relayed = RelaySetting.parse(value)
    return str(RelaySetting("", labels=True)) if relayed is not None and relayed.labels else ""


def new_token() -> str:
    """A word that output of this job does not contain by chance."""
    return secrets.token_hex(8)


def encode(token: str, sender: int, message: Mapping[str, Any]) -> bytes:
    """The lines of one message; `sender` is unique among those who may write at the same time."""
    text = base64.b64encode(json.dumps(message).encode())
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    head = f"{token} {sender} {len(pieces)}"
    return b"".join(_MARK + f"{head} {at} ".encode() + piece + b"\n" for at, piece in enumerate(pieces))


class MessageReader:
    """Takes messages out of lines; one reader for all streams, since parts of a message never change streams."""

    def __init__(self, token: str) -> None:
        self._mark = _MARK + token.encode() + b" "
        self._parts: dict[tuple[bytes, bytes], dict[int, bytes]] = {}

    def split(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Whole lines → those that are output, and the messages that became complete."""
        if self._mark not in data:
            return data, []
        kept: list[bytes] = []
        messages: list[dict[str, Any]] = []
        for line in data.splitlines(keepends=True):
            before, mark, rest = line.partition(self._mark)
            if mark:
                messages += self._take(rest)
                before = before if before.strip() and not before.endswith(b": ") else b""  # pdsh's name of a host
                kept.append(before + b"\n" if before else b"")
            else:
                kept.append(line)
        return b"".join(kept), messages

    def _take(self, rest: bytes) -> Iterator[dict[str, Any]]:
        try:
            sender, count, at, piece = rest.split()
            parts = self._parts.setdefault((sender, count), {})
            parts[int(at)] = piece
            if len(parts) == int(count):
                del self._parts[sender, count]
                message = json.loads(base64.b64decode(b"".join(parts[number] for number in range(int(count)))))
                if isinstance(message, dict):
                    yield message
        except (ValueError, KeyError):
            return  # not what `encode` writes: a program that printed the token of this job
