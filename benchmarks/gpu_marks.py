"""What one H200 has to reach, beside what was found; the numbers are those of the 1.1B and 8.0B shapes of Llama."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_llama import difference, window_means

__all__ = ["MARKS", "Mark", "lines", "speed", "typical"]

Runs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Mark:
    """A number to reach, at least or (with `most`) at most, and how it is found; None where it was not measured."""

    name: str
    wanted: float
    found: Callable[[Runs], float | None]
    most: bool = False


def typical(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One run of each contender's: medians of its times, the most of its memory, and the rest of its first."""
    return {
        name: {
            **runs[0],
            **{field: statistics.median(run[field] for run in runs) for field in ("step_s", "first_start_s")},
            "allocated_gib": max(run["allocated_gib"] for run in runs),
        }
        for name, runs in found.items()
    }


def speed(run: Mapping[str, Any]) -> float:
    """Tokens a second."""
    return float(run["tokens"] / run["step_s"])


def _speed(name: str) -> Callable[[Runs], float | None]:
    return lambda runs: speed(runs[name]) if name in runs else None


def _ratio(name: str, base: str) -> Callable[[Runs], float | None]:
    return lambda runs: speed(runs[name]) / speed(runs[base]) if name in runs and base in runs else None


def _field(name: str, field: str) -> Callable[[Runs], float | None]:
    return lambda runs: runs[name][field] if name in runs else None


def _apart(name: str, base: str) -> Callable[[Runs], float | None]:
    """How far the means of twenty losses are apart at most."""

    def found(runs: Runs) -> float | None:
        mine, theirs = (runs.get(each, {}).get("curve") for each in (name, base))
        return difference(window_means(mine), window_means(theirs)) if mine and theirs else None

    return found


FUSED, FP8, COMPILED = "ours:0-fused", "ours:0-fused-fp8", "ours:0-fused-compiled"
ROWS = f"{FP8}-rows"
MARKS = (
    Mark("fused kernels: tokens/s", 72_000, _speed(FUSED)),
    Mark("fused kernels ÷ plain", 1.33, _ratio(FUSED, "plain")),
    Mark("fused kernels: peak GiB", 33, _field(FUSED, "allocated_gib"), most=True),
    Mark("fp8: tokens/s", 85_000, _speed(FP8)),
    Mark("fp8 by rows: tokens/s", 85_000, _speed(ROWS)),
    Mark("fp8 by rows: losses from plain's", 0.03, _apart(ROWS, "plain"), most=True),
    Mark("compiled ÷ plain compiled", 1.10, _ratio(COMPILED, "plain-compiled")),
    Mark("8B: tokens/s", 8_000, _speed(f"8b {FUSED}")),
    Mark("8B, fp8: tokens/s", 11_000, _speed(f"8b {FP8}")),
    Mark("8B, fp8 by rows: tokens/s", 12_500, _speed(f"8b {ROWS}")),
    Mark("fused kernels: first start, s", 4, _field(FUSED, "first_start_s"), most=True),
    Mark("fp8: first start, s", 4, _field(FP8, "first_start_s"), most=True),
    Mark("8B: first start, s", 4, _field(f"8b {FUSED}", "first_start_s"), most=True),
    Mark("fused kernels: losses from plain's", 0.02, _apart(FUSED, "plain"), most=True),
)


def lines(runs: Runs) -> list[str]:
    """A row for each mark; `runs` are those of the 1.1B shape by their contenders, of the other as "8b CONTENDER"."""
    rows = [f"{'marks of one H200':<34} {'wanted':>10} {'found':>10}"]
    for mark in MARKS:
        found = mark.found(runs)
        if found is None:
            verdict, shown = "not measured", ""
        else:
            verdict = "met" if (found <= mark.wanted if mark.most else found >= mark.wanted) else "NOT MET"
            shown = _number(found)
        rows.append(
            f"{mark.name:<34} {('≤ ' if mark.most else '≥ ') + _number(mark.wanted):>10} {shown:>10}  {verdict}"
        )
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"
