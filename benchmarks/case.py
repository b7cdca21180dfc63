"""What a benchmark case declares (its measures, settings and targets) and what its `measure` receives.

Case files are read by the runner and run by every contender's interpreter, so nothing here may import more than the
standard library.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["CONTENDERS", "Case", "Job", "Measure", "Setting", "Target", "Value"]

Value = str | int | float | bool

# environments that a contender can live in; a case may add a flavour after a colon, as in "torch:fsdp2"
CONTENDERS = ("ours", "deepspeed", "torch")


@dataclass(frozen=True)
class Target:
    """A limit on one contender's median: absolute, or a multiple of another contender's median (`than`)."""

    limit: float
    than: str | None = None
    contender: str = "ours"
    ranks: int | None = None  # only for settings of this many ranks
    where: Mapping[str, Value] = field(default_factory=dict)  # only for settings with these parameters


@dataclass(frozen=True)
class Measure:
    """One number that a case reports; with several ranks the worst one that reported it counts."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    targets: tuple[Target, ...] = ()

    def worst(self, values: list[float]) -> float:
        return max(values) if self.better == "lower" else min(values)


@dataclass(frozen=True)
class Setting:
    """One way to run a case: how many ranks, with which parameters."""

    ranks: int = 1
    parameters: Mapping[str, Value] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = ["1 rank" if self.ranks == 1 else f"{self.ranks} ranks"]
        return ", ".join(parts + [f"{key} {value}" for key, value in self.parameters.items()])


@dataclass(frozen=True)
class Case:
    """A benchmark: the file that declares it also has `measure(job)`, which returns {measure name: number}."""

    name: str
    title: str
    file: str
    measures: tuple[Measure, ...]
    contenders: tuple[str, ...] = CONTENDERS
    ranks: tuple[int, ...] = (1,)
    parameters: tuple[Mapping[str, Value], ...] = ({},)
    rounds: int = 7
    timeout_s: float = 300.0

    def settings(self) -> list[Setting]:
        """Every combination of ranks and parameters."""
        return [Setting(ranks, parameters) for parameters in self.parameters for ranks in self.ranks]


@dataclass(frozen=True)
class Job:
    """What one rank of one measurement is told.

    `contender` is "ours", "deepspeed" or "torch", `flavour` what a case wrote after the colon. RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT are in the environment; `folder` is shared by the ranks and thrown away.
    """

    contender: str
    flavour: str
    rank: int
    ranks: int
    parameters: dict[str, Any]
    folder: str

    def line_up(self, label: str, timeout_s: float = 120.0) -> None:
        """Wait until every rank is here, without any process group: start lines must not depend on what they time."""
        here = Path(self.folder)
        (here / f"{label}.{self.rank}").touch()
        wanted = [here / f"{label}.{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + timeout_s
        while not all(mark.exists() for mark in wanted):
            if time.monotonic() > deadline:
                missing = [rank for rank, mark in enumerate(wanted) if not mark.exists()]
                raise TimeoutError(f"rank {self.rank} waited {timeout_s:.0f} s at {label!r} for ranks {missing}")
            time.sleep(0.0002)
