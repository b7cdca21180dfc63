"""The contract of a check: what a rank looks up, and what follows from the facts of all ranks.

`gather` runs on every rank and returns a dataclass of plain values, which travels as JSON. `judge` runs once, on the
facts of all ranks, and is pure: no file, no clock, no process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from deepspeed.config import Loaded
from deepspeed.preflight.arguments import Options
from deepspeed.preflight.finding import Finding, Told
from deepspeed.preflight.program import Program

__all__ = ["Check", "Company", "Here"]

F = TypeVar("F")


@dataclass(frozen=True)
class Company:
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
class Here:
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
    company: Company | None = None
    """None while ranks look by themselves."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that looks at what its host has once."""
        return self.local_rank == 0


class Check(ABC, Generic[F]):
    """One thing that is looked at."""

    name: ClassVar[str]
    about: ClassVar[str]
    """What is looked at, in a few words."""
    together: ClassVar[bool] = False
    """Whether all ranks have to gather at the same time."""
    fact: ClassVar[type[Any]]
    """The dataclass that `gather` returns."""

    @abstractmethod
    def gather(self, here: Here) -> F:
        """What this rank finds."""

    @abstractmethod
    def judge(self, told: Sequence[Told[F]]) -> list[Finding]:
        """What the facts of the ranks mean; at least one finding, of level OK if nothing is wrong."""
