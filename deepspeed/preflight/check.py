"""The contract of a check: what a rank looks up, what follows from the facts of all ranks, and the words for ranks.

`gather` runs on every rank and returns a dataclass of plain values, which travels as JSON. `judge` runs once, on the
facts of all ranks, and is pure: no file, no clock, no process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from deepspeed.config import Loaded
from deepspeed.config.schema import Schema
from deepspeed.launcher.binding import ranges
from deepspeed.preflight.arguments import Options, Program

F = TypeVar("F")
K = TypeVar("K")
V = TypeVar("V")
_MOST_RANGES = 6
_MOST_HOSTS = 4


class Level(str, Enum):
    """How bad it is; only a problem makes the preflight fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that a check found: what, on which ranks (none: all of them), and what to do about it."""

    level: Level
    what: str
    ranks: tuple[int, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class RankFact(Generic[F]):
    """The facts of one rank, and the host that it is on."""

    rank: int
    host: str
    fact: F


def finding(level: Level, what: str, told: Sequence[RankFact[Any]] = (), advice: str = "") -> CheckFinding:
    """A finding about the ranks of these facts."""
    return CheckFinding(level, what, tuple(each.rank for each in told), advice)


def passed(what: str) -> CheckFinding:
    """A finding that nothing is wrong."""
    return CheckFinding(Level.OK, what)


def few(numbers: Collection[int]) -> str:
    """`0-3, 7`; where there are many runs, the first of them and how many numbers there are."""
    runs = ranges(numbers).split(",")
    more = f", … ({len(numbers)} in all)" if len(runs) > _MOST_RANGES else ""
    return ", ".join(runs[:_MOST_RANGES]) + more


def rank_words(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 8-15`."""
    return f"rank{'s' * (len(ranks) > 1)} {few(ranks)}"


def name_ranks(told: Sequence[RankFact[Any]]) -> str:
    """`rank 3 on host b`, `ranks 8-15 on host b`, `ranks 0-31 on 4 hosts`."""
    hosts = list(dict.fromkeys(each.host for each in told))
    place = f"{len(hosts)} hosts" if len(hosts) > _MOST_HOSTS else f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
    return f"{rank_words({each.rank for each in told})} on {place}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def among(told: Sequence[RankFact[F]], ranks: Collection[int]) -> list[RankFact[F]]:
    """The facts of these ranks."""
    return [each for each in told if each.rank in ranks]


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key → its values, in the order of the pairs."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def by_host(told: Sequence[RankFact[F]]) -> dict[str, list[RankFact[F]]]:
    """Host → the facts of its ranks."""
    return grouped((each.host, each) for each in told)


def unlike_most(told: Sequence[RankFact[F]], values: Iterable[V]) -> Iterator[tuple[V, V, list[RankFact[F]]]]:
    """Each value that is not the usual one, the usual one, and the ranks that have the former, of one value per rank.

    The usual value is that of most ranks; of equally frequent ones, that of the first rank.
    """
    owners = grouped(zip(values, told, strict=True))
    if owners:
        usual = max(owners, key=lambda value: len(owners[value]))
        yield from ((value, usual, some) for value, some in owners.items() if value != usual)


@dataclass(frozen=True)
class AllRanks:
    """What checks use that need all ranks at once."""

    device: torch.device
    """Where tensors live that travel over the job's own group."""
    hosts: Sequence[str]
    """The host of every rank."""
    messages: ProcessGroup
    """A gloo group of all ranks, for memory of the host."""

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of every host."""
        found: dict[str, int] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, rank)
        return list(found.values())


@dataclass(frozen=True)
class ThisRank:
    """This rank, and what is asked of it."""

    rank: int
    world: int
    local_rank: int
    options: Options
    program: Program
    config: Loaded | str | None
    """The job's config, why it cannot be read, or None where the arguments name none."""
    environ: Mapping[str, str] = field(repr=False)
    """The variables that this process was started with: some libraries set others when they are imported."""
    now: Callable[[], int] = field(repr=False)
    """Nanoseconds of the host's clock."""
    joined: AllRanks | None = None
    """None while each rank works alone."""

    @property
    def all_ranks(self) -> AllRanks:
        """For checks that need all ranks at once."""
        assert self.joined is not None, "this check needs all ranks"
        return self.joined

    @property
    def schema(self) -> Schema | None:
        """The job's config, if there is one that can be read."""
        return self.config.schema if isinstance(self.config, Loaded) else None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that looks at what its host has once."""
        return self.local_rank == 0


class PreflightCheck(ABC, Generic[F]):
    """One thing that is looked at."""

    name: ClassVar[str]
    together: ClassVar[bool] = False
    """Whether all ranks have to gather at the same time."""
    fact: ClassVar[type[Any]]
    """The dataclass that `gather` returns."""

    @abstractmethod
    def gather(self, here: ThisRank) -> F:
        """What this rank finds."""

    @abstractmethod
    def judge(self, told: Sequence[RankFact[F]]) -> list[CheckFinding]:
        """What the facts of the ranks mean; at least one finding, of level OK if nothing is wrong."""


# ---- slow ranks

SLOWER = 0.5
"""Below this part of the median a rank is told."""
MUCH_SLOWER = 0.1
"""Below this part it is a problem: a job is as fast as its slowest rank."""


def stragglers(speeds: Mapping[K, float]) -> dict[K, float]:
    """Those below half of the median, with their part of it, the slowest first."""
    if not speeds:
        return {}
    middle = median(speeds.values())
    if len(speeds) == 2:
        middle = max(speeds.values())  # of two, only the faster one can say what is usual
    if middle <= 0:
        return {}
    parts = {key: speed / middle for key, speed in speeds.items()}
    slow = {key: part for key, part in parts.items() if part < SLOWER}
    return dict(sorted(slow.items(), key=lambda each: each[1]))


def level_of(parts: Mapping[K, float]) -> Level:
    """How bad it is to have these."""
    if not parts:
        return Level.OK
    return Level.PROBLEM if min(parts.values()) < MUCH_SLOWER else Level.WARNING
