"""Runs the cases: contenders take turns (A B C A B C ...), each measurement in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.case import Case, Setting
from benchmarks.processes import Contender, MeasurementError, measure

__all__ = ["CaseRun", "SettingRun", "fitting", "run_case", "turns"]

# (case, setting, round, contender) → what it measured
Measurer = Callable[[Case, Setting, Contender], dict[str, float]]
Observer = Callable[[Case, Setting, int, Contender], None]


@dataclass
class SettingRun:
    """The samples of one setting: `samples[contender][measure]`, one per round that succeeded."""

    setting: Setting
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # contender → why

    def add(self, contender: str, numbers: dict[str, float]) -> None:
        mine = self.samples.setdefault(contender, {})
        for name, value in numbers.items():
            mine.setdefault(name, []).append(value)


@dataclass
class CaseRun:
    """What one case gave."""

    case: Case
    contenders: list[str]
    settings: list[SettingRun]


def turns(contenders: Sequence[Contender], rounds: int) -> list[tuple[int, Contender]]:
    """Every contender once a round, in the same order: what disturbs the machine for a while disturbs all alike."""
    return [(turn, contender) for turn in range(rounds) for contender in contenders]


def fitting(case: Case, available: Iterable[Contender]) -> list[Contender]:
    """The contenders of a case whose environment is available; a flavour uses its environment's interpreter."""
    homes = {contender.environment: contender for contender in available}
    chosen = []
    for name in case.contenders:
        home = homes.get(name.partition(":")[0])
        if home is not None:
            chosen.append(Contender(name, home.python, home.variables))
    return chosen


def run_case(
    case: Case,
    available: Iterable[Contender],
    *,
    rounds: int | None = None,
    observer: Observer | None = None,
    measurer: Measurer = measure,
) -> CaseRun:
    """Measure every setting of a case. A contender that fails in a setting is left out of the rest of it."""
    contenders = fitting(case, available)
    runs = []
    for setting in case.settings():
        run = SettingRun(setting)
        for turn, contender in turns(contenders, rounds or case.rounds):
            if contender.name in run.failures:
                continue
            if observer is not None:
                observer(case, setting, turn, contender)
            try:
                run.add(contender.name, measurer(case, setting, contender))
            except MeasurementError as error:
                run.failures[contender.name] = str(error)
        runs.append(run)
    return CaseRun(case, [contender.name for contender in contenders], runs)
