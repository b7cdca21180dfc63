"""What runs will need, before they start: of the planner where the script shows its model, else by a first run.

`python -m deepspeed.autotuning.forecast JOB OUT` plans in a process of its own: it imports the user's script.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.autotuning.scheduler import TunedJob
from deepspeed.autotuning.space import Candidate, SearchSpace
from deepspeed.autotuning.utils import read_json
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher import processes
from deepspeed.launcher.binding import usable_cores
from deepspeed.log import logger
from deepspeed.memory.estimate import estimate_zero1_model_states_mem_needs as states_of_stage_1
from deepspeed.memory.estimate import estimate_zero2_model_states_mem_needs as states_of_stage_2
from deepspeed.memory.estimate import estimate_zero3_model_states_mem_needs as states_of_stage_3
from deepspeed.planning.ceilings import as_json, device_of, measure
from deepspeed.planning.planner import Cluster, plan_model
from deepspeed.planning.sources import ModelSource
from deepspeed.planning.trace import STEP, PlannedModel, quiet
from deepspeed.profiling.autotuning import write_whole

_APART = 8  # the second micro batch of a stage that is traced, as a multiple of the first
_MOST_SECONDS = 900.0


@dataclass(frozen=True)
class Trace:
    """A planned config: memory of the rank that holds most, and seconds of a micro step and of the update."""

    micro: int
    peak: float
    micro_seconds: float
    step_seconds: float
    parameters: int


@dataclass(frozen=True)
class StageForecast:
    """Memory and time of any micro batch at a stage: both grow by the same amount with each sample."""

    first: Trace
    second: Trace

    def peak(self, micro: int) -> float:
        """Bytes of a rank."""
        return _between(self.first.micro, self.first.peak, self.second.micro, self.second.peak, micro)

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step; 0 where no device is known."""
        first, second = self.first, self.second
        each = _between(first.micro, first.micro_seconds, second.micro, second.micro_seconds, candidate.micro)
        return candidate.steps * each + first.step_seconds


def _between(x0: int, y0: float, x1: int, y1: float, x: int) -> float:
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class Forecast:
    """What is known before the runs."""

    limit: int | None = None
    """Bytes that a rank may use."""
    parameters: int | None = None
    stages: Mapping[int, StageForecast] | None = None
    refused: Mapping[int, str] | None = None
    """Stages that no engine can be built at, and why."""
    activations: float = 0.0
    """Bytes of a sample, where a run measured them."""
    world: int = 1

    def peak(self, candidate: Candidate) -> float | None:
        """Bytes of a rank; None where nothing is known."""
        if self.stages is not None and candidate.stage in self.stages:
            return self.stages[candidate.stage].peak(candidate.micro)
        if self.parameters is None:
            return None
        return _states(self.parameters, candidate.stage, self.world) + self.activations * candidate.micro


def _states(parameters: int, stage: int, world: int) -> float:
    """Published formulas for mixed precision and Adam."""
    if stage == 3:
        return states_of_stage_3(parameters, 0, world, 1, cpu_offload=False, cpu_offload_params=False)[1]
    ranks = 1 if stage == 0 else world
    needs = states_of_stage_2 if stage == 2 else states_of_stage_1
    return needs(parameters, ranks, 1, cpu_offload=False)[1]


def planned(job: TunedJob, space: SearchSpace, given: Mapping[str, Any], folder: Path, seconds: float) -> Forecast:
    """The planner's forecast, or that of an earlier start of the same search."""
    wanted, file, out = _job(job, space, given), folder / "forecast_job.json", folder / "forecast.json"
    found = read_json(out)
    if found is None or read_json(file) != wanted or not found.get("done"):
        out.unlink(missing_ok=True)
        write_whole(file, wanted)
        _run(file, out, folder / "forecast.log", job, min(seconds, _MOST_SECONDS))
        found = read_json(out) or {}
    stages: dict[int, StageForecast] = {}
    refused: dict[int, str] = {}
    traces: Mapping[str, Any] = found.get("traces", {})
    for stage in space.stages:
        rows = [row for name, row in traces.items() if name.startswith(f"{stage} ")]
        made = [Trace(**row) for row in rows if "error" not in row]
        if made:
            stages[stage] = StageForecast(made[0], made[-1])
        elif rows:
            refused[stage] = str(rows[0]["error"])
    if not stages:
        why = found.get("error") or next(iter(refused.values()), f"see {folder / 'forecast.log'}")
        logger.warning("the planner cannot see the model of %s, so that the first run counts it: %s", job.script, why)
        return Forecast(found.get("limit"), world=job.world)
    parameters = next(iter(stages.values())).first.parameters
    return Forecast(found.get("limit"), parameters, stages, refused, world=job.world)


def _job(job: TunedJob, space: SearchSpace, given: Mapping[str, Any]) -> dict[str, Any]:
    traced = []
    extras = space.baseline.extras
    for stage in space.stages:
        sizes = [each for each in space.candidates() if each.stage == stage and each.extras == extras]
        least = min(sizes, key=lambda each: each.micro)
        second = max((each for each in sizes if each.micro <= least.micro * _APART), key=lambda each: each.micro)
        for each in dict.fromkeys((least, second)):
            traced.append([stage, each.micro, Candidate(stage, each.micro, 1, extras).config(given, space.replicas)])
    return {
        "script": str(Path(job.script).resolve()) if job.shows_model() else None,
        "digest": job.digest,
        "world": job.world,
        "per_node": job.world // job.nodes,
        "traced": traced,
    }


def _run(file: Path, out: Path, log: Path, job: TunedJob, seconds: float) -> None:
    """Plan in a process of its own, with the cores that a rank has."""
    threads = str(max(1, usable_cores() // max(1, job.world // job.nodes)))
    with open(log, "wb") as text:
        try:
            subprocess.run(
                [sys.executable, "-u", "-m", "deepspeed.autotuning.forecast", str(file), str(out)],
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=text,
                env={"OMP_NUM_THREADS": threads, **os.environ},
                timeout=seconds,
                check=False,
                preexec_fn=processes.end_with_parent(),
            )
        except subprocess.TimeoutExpired:
            logger.warning("the forecast took more than %.0f s; what it found by then is used", seconds)


def main(file: Path, out: Path) -> None:
    """Measure this device, then plan each config; the file is whole after each of them."""
    job = read_json(file)
    assert job is not None, f"{file} was just written"
    found: dict[str, Any] = {"traces": {}}
    accelerator = get_accelerator()
    on_host = accelerator.device_name() == "cpu"
    if job["script"] is None:
        found.update(limit=accelerator.total_memory() // (job["per_node"] if on_host else 1), done=True)
        found["error"] = "it has no function such as build_model() that returns the model"
        write_whole(out, found)
        return
    device_file = out.with_name("device.json")
    if not device_file.exists():
        device_file.write_text(as_json(measure()), encoding="utf-8")
    device = device_of(str(device_file))
    found["limit"] = device.memory // (job["per_node"] if on_host else 1)
    source = ModelSource(job["script"])
    for stage, micro, config in job["traced"]:
        cluster = Cluster(job["world"], job["per_node"], device, found["limit"])
        try:
            plan = plan_model(PlannedModel(source, quiet(config), source.example), cluster)
        except DeepSpeedError as error:
            found["traces"][f"{stage} {micro}"] = {"error": str(error)}
        else:
            time = plan.time
            assert time is not None, "the device is known"
            update = sum(phase.total for phase in time.phases if phase.phase == STEP)
            trace = Trace(micro, plan.peak, time.total - update, update, plan.largest.parameters)
            found["traces"][f"{stage} {micro}"] = asdict(trace)
        write_whole(out, found)
    write_whole(out, {**found, "done": True})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
