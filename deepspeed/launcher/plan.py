"""What the launcher tells the guard: the ranks to start on this node, as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["RETIRE", "Plan", "RankPlan"]

RETIRE = 255  # the byte, beside those of signals, that lets the ranks make way for a new start of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: `environment` is added to that of the guard, `cores` limits it, `log` takes its output."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    shown: str  # the command as messages show it, without secrets
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All ranks of one node; `forward_to_groups` passes signals on to a rank's children too.

    `relay` is the value of `messages.VARIABLE`: who failed first of all nodes is told by a launcher that reads along.
    """

    host: str
    ranks: tuple[RankPlan, ...]
    log_level: str = "info"
    pid_file: str | None = None
    forward_to_groups: bool = False
    relay: str = ""

    def dumps(self) -> str:
        """One line of ASCII; names that are not text survive as lone surrogates."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, line: str) -> Plan:
        """What `dumps` was called on."""
        fields = json.loads(line)
        ranks = tuple(
            RankPlan(**{**each, "command": tuple(each["command"]), "cores": tuple(each["cores"])})
            for each in fields.pop("ranks")
        )
        return cls(ranks=ranks, **fields)
