"""What checks say: findings about ranks; and the words that name ranks, hosts and those that are not like the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from deepspeed.launcher.binding import ranges

__all__ = ["Finding", "Level", "Told", "among", "by_host", "counted", "few", "odd_ones", "who"]

F = TypeVar("F")
_MOST_RANGES = 6
_MOST_HOSTS = 4


class Level(str, Enum):
    """How bad it is; only a problem makes the preflight fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found: what, on which ranks (none: all of them), and what to do about it."""

    level: Level
    what: str
    ranks: tuple[int, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Told(Generic[F]):
    """The facts of one rank, and the host that it is on."""

    rank: int
    host: str
    fact: F


def few(numbers: Collection[int]) -> str:
    """`0-3, 7`; where there are many runs, the first of them and how many numbers there are."""
    runs = ranges(numbers).split(",")
    more = f", … ({len(numbers)} in all)" if len(runs) > _MOST_RANGES else ""
    return ", ".join(runs[:_MOST_RANGES]) + more


def who(told: Sequence[Told[F]]) -> str:
    """`rank 3 on host b`, `ranks 8-15 on host b`, `ranks 0-31 on 4 hosts`."""
    hosts = list(dict.fromkeys(each.host for each in told))
    ranks = {each.rank for each in told}
    place = f"{len(hosts)} hosts" if len(hosts) > _MOST_HOSTS else f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
    return f"rank{'s' * (len(ranks) > 1)} {few(ranks)} on {place}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def among(told: Sequence[Told[F]], ranks: Iterable[int]) -> list[Told[F]]:
    """The facts of these ranks."""
    wanted = set(ranks)
    return [each for each in told if each.rank in wanted]


def by_host(told: Sequence[Told[F]]) -> dict[str, list[Told[F]]]:
    """Host → the facts of its ranks."""
    hosts: dict[str, list[Told[F]]] = {}
    for each in told:
        hosts.setdefault(each.host, []).append(each)
    return hosts


def odd_ones(values: Mapping[int, F]) -> tuple[F, dict[F, list[int]]]:
    """The value that most ranks have (of equals, that of the lowest rank), and the others with their ranks."""
    counts = Counter(values.values())
    most = max(counts.values())
    usual = next(value for _, value in sorted(values.items()) if counts[value] == most)
    others: dict[F, list[int]] = {}
    for rank, value in sorted(values.items()):
        if value != usual:
            others.setdefault(value, []).append(rank)
    return usual, others
