"""What a search found: `summary.txt`, and one HTML file without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from deepspeed.autotuning.scheduler import Outcome
from deepspeed.autotuning.space import Candidate
from deepspeed.planning.page import document, picture

_COLOURS = ("#3b76c4", "#d9622b", "#4c9a52", "#8d5bb5")
"""Of the stages."""
_WIDTH, _HEIGHT, _EDGE = 960, 320, 40
_UNITS = {"throughput": "samples/s", "latency": "ms per step", "flops": "operations/s per device"}


@dataclass(frozen=True)
class ExperimentRecord:
    """An experiment that was run; `value` is that of the metric, None where nothing was measured."""

    candidate: Candidate
    outcome: Outcome
    value: float | None


def _best(records: Sequence[ExperimentRecord], metric: str) -> ExperimentRecord | None:
    sign = -1 if metric == "latency" else 1
    return max((each for each in records if each.value is not None), key=lambda each: sign * _of(each), default=None)


def _of(record: ExperimentRecord) -> float:
    return math.nan if record.value is None else record.value


def summary(records: Sequence[ExperimentRecord], metric: str) -> str:
    """A row for each stage, and one for all."""
    rows = [("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")]
    spaces = {f"z{stage}": [each for each in records if each.candidate.stage == stage] for stage in range(4)}
    for name, found in {**spaces, "global": list(records)}.items():
        if found:
            best = _best(found, metric)
            shown = ("-", "-") if best is None else (f"{_of(best):.6g}", best.candidate.name)
            rows.append((name, str(len(found)), *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


def page(records: Sequence[ExperimentRecord], pruned: Mapping[Candidate, str], metric: str) -> str:
    """The whole file."""
    title = f"Autotuning for {metric}"
    best = _best(records, metric)
    found = (
        "Nothing was measured." if best is None else f"Best: {best.candidate.name}, {_of(best):.6g} {_UNITS[metric]}"
    )
    parts = [f"<h1>{title}</h1><p>{escape(found)}</p>", _chart(records, metric), "<h2>Experiments</h2>"]
    parts.append(_table(records, metric))
    if pruned:
        rows = "".join(f"<tr><td>{escape(each.name)}</td><td>{escape(why)}</td></tr>" for each, why in pruned.items())
        parts.append(f"<h2>Not run</h2><table>{rows}</table>")
    return document(title, parts)


def _table(records: Sequence[ExperimentRecord], metric: str) -> str:
    names = ("experiment", _UNITS[metric], "ending", "memory", "run in", "why")
    rows = ["".join(f"<th>{name}</th>" for name in names)]
    for each in records:
        outcome, value = each.outcome, each.value
        memory = outcome.metrics.get("max_mem_per_gpu")
        cells = (
            each.candidate.name,
            "" if value is None else f"{value:.6g}",
            outcome.ending.value,
            "" if memory is None else f"{memory / 2**30:.2f} GiB",
            f"{outcome.seconds:.1f} s",
            outcome.reason,
        )
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _chart(records: Sequence[ExperimentRecord], metric: str) -> str:
    """The metric over the micro batch, a colour for each stage."""
    measured = [each for each in records if each.value is not None]
    if not measured:
        return ""
    sizes = [math.log2(each.candidate.micro) for each in measured]
    low, span, most = min(sizes), (max(sizes) - min(sizes)) or 1.0, max(map(_of, measured)) or 1.0
    marks = [f'<text x="4" y="14">{most:.6g} {_UNITS[metric]}</text>']
    for size in sorted({each.candidate.micro for each in measured}):
        x = _EDGE + (math.log2(size) - low) / span * (_WIDTH - 2 * _EDGE)
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{size}</text>')
    for each in measured:
        x = _EDGE + (math.log2(each.candidate.micro) - low) / span * (_WIDTH - 2 * _EDGE)
        y = _HEIGHT - _of(each) / most * (_HEIGHT - 24)
        said = escape(f"{each.candidate.name}: {_of(each):.6g}")
        colour = _COLOURS[each.candidate.stage]
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"><title>{said}</title></circle>')
    stages = sorted({each.candidate.stage for each in measured})
    keys = "".join(f'<span class="key" style="background:{_COLOURS[stage]}"></span>stage {stage}' for stage in stages)
    svg = picture(_HEIGHT + 24, f"{metric} over the micro batch", marks)
    return f"<p>{keys}</p>{svg}<p>micro batch</p>"
