"""`deepspeed --autotuning tune|run`: forecasts, experiments, and the files that tell what was found."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NoReturn

from deepspeed.autotuning.forecast import Forecast, planned
from deepspeed.autotuning.scheduler import BudgetSpent, Ending, Experiment, Outcome, ResourceManager, TunedJob
from deepspeed.autotuning.space import Candidate, SearchSpace
from deepspeed.autotuning.tuner import ExperimentOrder, GridSearchTuner, ModelBasedTuner, RandomTuner
from deepspeed.config.load import load
from deepspeed.config.read import read
from deepspeed.errors import UsageError
from deepspeed.launcher.console import emit
from deepspeed.log import logger
from deepspeed.planning.page import document, picture
from deepspeed.profiling.autotuning import write_whole

_TUNERS: Mapping[str, type[ExperimentOrder]] = {
    "model_based": ModelBasedTuner,
    "gridsearch": GridSearchTuner,
    "random": RandomTuner,
}
_VALUES = {"throughput": "throughput", "latency": "latency", "flops": "FLOPS_per_gpu"}
PROFILE = "profile_model_info"
OPTIMAL, COMMAND, SUMMARY, REPORT = "ds_config_optimal.json", "cmd_optimal.txt", "summary.txt", "report.html"


class Autotuner:
    """The search for the fastest config of a job: of the parsed command line, on these slots of hosts."""

    def __init__(self, args: argparse.Namespace, active_resources: Mapping[str, Sequence[Any]]) -> None:
        world = sum(map(len, active_resources.values()))
        self._job = TunedJob.of(args, len(active_resources), world)
        given = read(self._job.config)
        section = {**(given.values.get("autotuning") or {}), "enabled": True}
        self._config = load({"train_micro_batch_size_per_gpu": 1, "autotuning": section}).schema.autotuning
        self._given = given.values
        self._space = SearchSpace(self._given, self._config, self._job)
        minutes = args.budget
        if minutes is not None and not minutes > 0:
            raise UsageError(f"--budget is {minutes:g} minutes; expected a number above zero")
        self._seconds = minutes * 60.0 if minutes is not None else float("inf")
        deadline = None if minutes is None else time.monotonic() + self._seconds
        self._folder = Path(self._config.results_dir).resolve()
        if self._config.overwrite:
            self._forget()
        self._runs = ResourceManager(self._job, self._config, deadline)
        self._records: list[ExperimentRecord] = []

    @property
    def best(self) -> ExperimentRecord | None:
        """The best experiment so far."""
        return _best(self._records, self._config.metric)

    def tune(self) -> None:
        """Run experiments until the order has no more, or the budget is spent; write what was found after each."""
        began = time.monotonic()
        try:
            forecast = self._forecast()
            candidates = self._space.candidates(forecast.parameters)
            order = _TUNERS[self._config.tuner_type](candidates, self._config, forecast, self._space.baseline)
            while (candidate := order.next()) is not None:
                self._try(candidate, order)
        except BudgetSpent as spent:
            logger.warning("%s; the search ends after %d experiments", spent, len(self._records))
        self._require_result()
        logger.info("the search took %.0f s", time.monotonic() - began)
        self.write_optimal_config()

    def print_tuning_results(self) -> None:
        """The table of `summary.txt` on standard output."""
        emit(summary(self._records, self._config.metric))

    def write_optimal_config(self) -> None:
        """`ds_config_optimal.json` and `cmd_optimal.txt`: the best config so far, and the job with it."""
        best = self.best
        if best is None:
            return
        config = best.candidate.config(self._given, self._space.replicas)
        write_whole(self._folder / OPTIMAL, config)
        command = shlex.join(self._optimal(config))
        (self._folder / COMMAND).write_text(f"deepspeed {command}\n", encoding="utf-8")

    def run_after_tuning(self) -> None:
        """Become the job with the best config."""
        words = self._job.program(self._optimal(json.loads((self._folder / OPTIMAL).read_text(encoding="utf-8"))))
        os.execv(words[0], words)

    def _optimal(self, config: Mapping[str, Any]) -> list[str]:
        return self._job.command(self._folder / OPTIMAL, config, self._config.arg_mappings or {})

    def _forget(self) -> None:
        """Delete results of earlier searches, and nothing else that lies in their folders."""
        for file in self._folder.glob("*/exp.json"):
            Path(self._config.exps_dir, f"{file.parent.name}.json").unlink(missing_ok=True)
            shutil.rmtree(file.parent)
        for name in ("device.json", "forecast.json", OPTIMAL, COMMAND, SUMMARY, REPORT):
            (self._folder / name).unlink(missing_ok=True)

    def _forecast(self) -> Forecast:
        forecast = planned(self._job, self._space, self._given, self._folder, self._seconds / 2)
        given = self._config.model_info.num_params
        if forecast.stages is not None or forecast.limit is None:
            return forecast
        if given is not None:
            return Forecast(forecast.limit, given, world=self._job.world)
        smallest = [each for each in self._space.candidates() if each.stage == max(self._space.stages)]
        candidate = min(smallest, key=lambda each: (each.micro, each.steps))
        experiment = self._experiment(candidate, PROFILE)
        outcome = self._runs.run(experiment, model_info=True)
        if outcome.ending is not Ending.MEASURED:
            self._stop(PROFILE, outcome)
        facts = outcome.metrics
        each = facts["activation_mem_per_gpu"] / max(facts["train_micro_batch_size_per_gpu"], 1)
        return Forecast(forecast.limit, facts["num_params"], activations=each, world=self._job.world)

    def _experiment(self, candidate: Candidate, name: str = "") -> Experiment:
        config = candidate.config(self._given, self._space.replicas)
        return Experiment(name or candidate.name, config, candidate.samples)

    def _try(self, candidate: Candidate, order: ExperimentOrder) -> None:
        outcome = self._runs.run(self._experiment(candidate))
        order.tell(candidate, outcome)
        value = outcome.metrics.get(_VALUES[self._config.metric])
        self._records.append(ExperimentRecord(candidate, outcome, value))
        shown = outcome.reason if value is None else f"{self._config.metric} {value:.6g}"
        logger.info("%s, %s after %.0f s: %s", candidate.name, outcome.ending.value, outcome.seconds, shown)
        if len(self._records) == 1 and outcome.ending in (Ending.FAILED, Ending.SHORT, Ending.HUNG):
            self._stop(candidate.name, outcome)
        self.write_optimal_config()
        (self._folder / SUMMARY).write_text(summary(self._records, self._config.metric), encoding="utf-8")
        report = page(self._records, order.pruned, self._config.metric)
        (self._folder / REPORT).write_text(report, encoding="utf-8")

    def _stop(self, name: str, outcome: Outcome) -> NoReturn:
        raise UsageError(
            f"the first run, {name}, {outcome.ending.value}: {outcome.reason}\nIts output is in {self._folder / name}; "
            "no further run was started"
        )

    def _require_result(self) -> None:
        if self.best is None:
            rows = "".join(f"\n  {each.candidate.name}: {each.outcome.reason}" for each in self._records)
            raise UsageError(
                f"no experiment measured anything, of {len(self._records)} that were run; the folders below "
                f"{self._folder} have their output{rows}"
            )


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
    sizes = sorted({each.candidate.micro for each in measured})
    low, span, most = math.log2(sizes[0]), math.log2(sizes[-1] / sizes[0]) or 1.0, max(map(_of, measured)) or 1.0
    places = {size: _EDGE + (math.log2(size) - low) / span * (_WIDTH - 2 * _EDGE) for size in sizes}
    marks = [f'<text x="4" y="14">{most:.6g} {_UNITS[metric]}</text>']
    for size, x in places.items():
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{size}</text>')
    for each in measured:
        x = places[each.candidate.micro]
        y = _HEIGHT - _of(each) / most * (_HEIGHT - 24)
        said = escape(f"{each.candidate.name}: {_of(each):.6g}")
        colour = _COLOURS[each.candidate.stage]
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"><title>{said}</title></circle>')
    stages = sorted({each.candidate.stage for each in measured})
    keys = "".join(f'<span class="key" style="background:{_COLOURS[stage]}"></span>stage {stage}' for stage in stages)
    svg = picture(_HEIGHT + 24, f"{metric} over the micro batch", marks)
    return f"<p>{keys}</p>{svg}<p>micro batch</p>"
