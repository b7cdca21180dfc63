"""What the launcher tells the relay: the programs that reach other hosts, as one line of JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Link", "RelayPlan", "Style"]

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
    an elastic job tries a lost host again.
    """

    links: tuple[Link, ...]
    world: int
    token: str
    style: Style = "plain"
    hosts: tuple[str, ...] = ()
    log_level: str = "info"
    pid_file: str | None = None
    independent: bool = False
    again: float = 15.0

    def dumps(self) -> str:
        """One line of ASCII."""
        fields = asdict(self)
        for each in fields["links"]:
            each["opening"] = base64.b64encode(each["opening"]).decode()
        return json.dumps(fields)

    @classmethod
    def loads(cls, line: str) -> RelayPlan:
        """What `dumps` was called on."""
        fields = json.loads(line)
        links = tuple(Link(**{**each, "opening": base64.b64decode(each["opening"])}) for each in fields.pop("links"))
        return cls(links=links, **{**fields, "hosts": tuple(fields["hosts"])})
