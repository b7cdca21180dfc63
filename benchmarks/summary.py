"""Statistics of a run: medians, spread, ratios, targets, as plain values that serialise to JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.case import Measure, Setting, Target
from benchmarks.runner import CaseRun, SettingRun

__all__ = [
    "CaseSummary",
    "Figure",
    "Row",
    "SettingSummary",
    "Verdict",
    "applies",
    "figure",
    "number",
    "ratios",
    "summarise",
    "verdict",
]


@dataclass(frozen=True)
class Figure:
    """One contender's samples of one measure; `spread` is half of the interquartile range."""

    median: float
    spread: float
    low: float
    high: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """A target with its outcome; `met` is None where there is nothing to judge."""

    statement: str
    met: bool | None


@dataclass(frozen=True)
class Row:
    """One measure over all contenders; `ratios` are ours divided by theirs."""

    measure: str
    title: str
    unit: str
    better: str
    figures: dict[str, Figure]
    ratios: dict[str, float]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class SettingSummary:
    """The rows of one setting."""

    label: str
    ranks: int
    parameters: dict[str, object]
    rows: tuple[Row, ...]
    failures: dict[str, str]


@dataclass(frozen=True)
class CaseSummary:
    """Everything that the table and the JSON say about one case."""

    name: str
    title: str
    contenders: tuple[str, ...]
    settings: tuple[SettingSummary, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def figure(samples: Sequence[float]) -> Figure:
    """Median and spread of at least one sample."""
    if not samples:
        raise ValueError("a figure needs at least one sample, found none")
    spread = 0.0
    if len(samples) > 1:
        lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
        spread = (upper - lower) / 2
    return Figure(statistics.median(samples), spread, min(samples), max(samples), tuple(samples))


def number(value: float) -> str:
    """About three significant digits, without exponents; whole numbers as they are."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def ratios(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Ours divided by each other contender; none where a median is not positive (a difference within the noise)."""
    ours = figures.get("ours")
    if ours is None or ours.median <= 0:
        return {}
    others = {name: theirs.median for name, theirs in figures.items() if name != "ours"}
    return {name: ours.median / median for name, median in others.items() if median > 0}


def verdict(target: Target, measure: Measure, figures: Mapping[str, Figure]) -> Verdict:
    """Whether a target is met, and in words what it asks for."""
    sign = "≤" if measure.better == "lower" else "≥"
    who = "" if target.contender == "ours" else f"{target.contender} "
    if target.than is None:
        statement = f"{who}{sign} {number(target.limit)} {measure.unit}"
    else:
        statement = f"{who}{sign} {target.limit:g} × {target.than}"
    mine = figures.get(target.contender)
    reference = None if target.than is None else figures.get(target.than)
    if mine is None or (target.than is not None and reference is None):
        return Verdict(statement, None)
    bound = target.limit * (reference.median if reference is not None else 1.0)
    return Verdict(statement, mine.median <= bound if measure.better == "lower" else mine.median >= bound)


def applies(target: Target, setting: Setting) -> bool:
    """Whether a target is meant for a setting: its number of ranks, and its parameters."""
    meant = all(setting.parameters.get(name) == value for name, value in target.where.items())
    return meant and target.ranks in (None, setting.ranks)


def _row(measure: Measure, run: SettingRun, contenders: Sequence[str]) -> Row:
    figures = {
        name: figure(run.samples[name][measure.name])
        for name in contenders
        if name not in run.failures and run.samples.get(name, {}).get(measure.name)
    }
    verdicts = tuple(verdict(target, measure, figures) for target in measure.targets if applies(target, run.setting))
    return Row(measure.name, measure.title, measure.unit, measure.better, figures, ratios(figures), verdicts)


def summarise(run: CaseRun) -> CaseSummary:
    """The figures of every setting of a case."""
    settings = tuple(
        SettingSummary(
            label=part.setting.label,
            ranks=part.setting.ranks,
            parameters=dict(part.setting.parameters),
            rows=tuple(_row(measure, part, run.contenders) for measure in run.case.measures),
            failures=dict(part.failures),
        )
        for part in run.settings
    )
    return CaseSummary(run.case.name, run.case.title, tuple(run.contenders), settings)
