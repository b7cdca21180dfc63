"""Everything about one CUDA device in one run of under ten minutes: training, kernels, where the time goes, losses.

    python benchmarks/gpu.py --out FOLDER            # tables on the standard output; gpu.txt, gpu.json, gpu.svg there
    python benchmarks/gpu.py --seconds 300           # what is most important, in five minutes
    python benchmarks/gpu.py --parts training --curve 0
    python benchmarks/gpu.py --deepspeed-path FOLDER # real DeepSpeed as well
    python benchmarks/gpu.py --device cpu --shape tiny --parts training --steps 2 --curve 30     # does it run?

Each contender is a process with a limit of time, and starts with nothing in the caches of compilers. Those that are
compared most closely take turns twice. What is found is
written as it comes, the most important first; when the time is over, or the script is told to end, the tables show what
is there. `gpu_llama.py`, `gpu_kernels.py` and `breakdown.py` measure; it needs torch, transformers and what the library
needs, and draws without any package.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bars, breakdown, gpu_llama, gpu_marks  # noqa: E402 - a script's folder is on the path, not the one above

__all__ = ["CURVES", "PARTS", "Job", "Report", "main", "plan"]

PARTS = ("training", "kernels", "8b")
CURVES = ("plain", "ours:0-fused", "ours:0-fused-fp8", "ours:0-fused-fp8-rows", "ours:0-fused-fp8-blocks")
"""Whose losses are compared over many steps."""
LEAST_S = 20.0
"""With less time left nothing is begun."""
KERNELS = [sys.executable, "-m", "benchmarks.gpu_kernels"]


@dataclass(frozen=True)
class Job:
    """One process: what it measures, and how long it may take."""

    part: str
    contender: str
    limit_s: float = 90.0

    @property
    def name(self) -> str:
        """As tables have it."""
        return {"training": "", "8b": "8b "}.get(self.part, "") + self.contender


# the most important first: what comes last is what a short run goes without
_PLAN = (
    Job("training", "plain", 120),
    Job("training", "ours:0-fused", 120),
    Job("training", "ours:0-fused-fp8", 120),
    Job("training", "ours:0-fused-fp8-rows", 120),
    Job("training", "ours:0-fused-fp8-blocks", 120),
    Job("kernels", "kernels", 120),
    Job("training", "plain-compiled", 150),
    Job("training", "ours:0-fused-compiled"),
    Job("8b", "ours:0-fused", 120),
    Job("8b", "ours:0-fused-fp8", 120),
    Job("8b", "ours:0-fused-fp8-rows", 120),
    Job("training", "plain"),  # once more: clocks and temperatures are others by now
    Job("training", "ours:0-fused"),
    Job("training", "ours:0-fused-fp8"),
    Job("training", "ours:0", 120),
    Job("training", "ours:3-fused"),
    Job("training", "ours:0-fused-fp8-compiled"),
    Job("training", "ours:0-fused-codes"),
    Job("training", "ours:0-fused-backward"),
)


def plan(parts: Sequence[str], contenders: Sequence[str] = (), *, deepspeed: bool = False) -> list[Job]:
    """What is run, in order; `contenders` chooses those of the training."""
    jobs = [*_PLAN, *([Job("training", "deepspeed:2", 150)] if deepspeed else [])]
    jobs = [job for job in jobs if job.part in parts and not (job.part == "training" and contenders)]
    return jobs + [Job("training", name, 150) for name in contenders if "training" in parts]


@dataclass
class Report:
    """What was found so far, in a folder and as text."""

    folder: Path
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Why there is no result, or not all of one."""

    def text(self) -> str:
        """All tables."""
        one = {name: runs for name, runs in self.runs.items() if not name.startswith("8b ")}
        large = {name: runs for name, runs in self.runs.items() if name.startswith("8b ")}
        parts = [gpu_llama.table(found) for found in (one, large) if found]
        seen = {name: runs[0]["breakdown"] for name, runs in self.runs.items() if runs[0].get("breakdown")}
        parts += [breakdown.lines(seen)] if seen else []
        curves = {name: runs[0]["curve"] for name, runs in self.runs.items() if runs[0].get("curve")}
        parts += [gpu_llama.curve_lines(curves)] if curves else []
        parts += [self.kernels, gpu_marks.lines(gpu_marks.typical(self.runs))]
        parts += [[f"not here: {name}: {why}" for name, why in self.missing.items()]]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def write(self) -> None:
        """Everything, as it is now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {"runs": self.runs, "kernels": self.kernels, "missing": self.missing}
        (self.folder / "gpu.json").write_text(json.dumps(known, indent=1) + "\n")
        (self.folder / "gpu.txt").write_text(self.text() + "\n")
        if self.runs:
            (self.folder / "gpu.svg").write_text(picture(gpu_marks.typical(self.runs)))


def picture(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Bars of speeds, peaks and kinds of kernels."""
    every = list(runs.values())
    return bars.draw(
        list(runs),
        [
            bars.Panel("tokens/s", [{"": gpu_marks.speed(run)} for run in every]),
            bars.Panel("peak, GiB", [{"": run["allocated_gib"]} for run in every], 1),
            bars.Panel("first start, s", [{"": max(0.0, run["first_start_s"])} for run in every], 1),
            bars.Panel("ms of the device in a step", [(run["breakdown"] or {"kinds": {}})["kinds"] for run in every]),
        ],
    )


def kernels(limit_s: float) -> tuple[list[str], str]:
    """(lines of each kernel alone, against a copy; what went wrong), of a process whose memory is gone afterwards."""
    process = subprocess.Popen(
        KERNELS,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    problem = ""
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        gpu_llama.end([process])
        said, problem = process.communicate()[0], f"no end within {limit_s:.0f} s"
    finally:
        gpu_llama.end([process])
    if not problem and process.returncode:
        problem = f"exit code {process.returncode}"
    return said.splitlines(), problem


def run(job: Job, options: argparse.Namespace, limit_s: float, report: Report) -> None:
    """Do one job; what it found, or why it found nothing, is in the report."""
    if job.part == "kernels":
        report.kernels, problem = kernels(limit_s)
        print("\n".join(report.kernels), flush=True)
    else:
        again = job.name in report.runs
        changes = {"timeout": limit_s, "curve": options.curve if job.name in CURVES and not again else 0}
        if job.part == "8b":
            changes |= {"shape": "8b", "steps": 4, "warm_up": 5}
        given = argparse.Namespace(**{**vars(options), **changes})
        seen = given.device == "cuda" and job.part == "training" and not again
        (found,) = gpu_llama.start(job.contender, given, breakdown=seen)
        problem = "no result" if found is None else found.get("problem", "")
        if found is not None:
            report.runs.setdefault(job.name, []).append(found)
    if problem:
        report.missing[job.name] = problem


def measure(jobs: Sequence[Job], options: argparse.Namespace, report: Report, began: float) -> None:
    """All jobs for which there is time."""
    for job in jobs:
        left = options.seconds - (time.monotonic() - began)
        if left < LEAST_S:
            report.missing[job.name] = f"not begun: {left:.0f} of {options.seconds:.0f} s were left (--seconds)"
            continue
        start = time.monotonic()
        run(job, options, min(job.limit_s, left), report)
        now = time.monotonic()
        done = report.missing.get(job.name) or "done"
        print(f"{job.name}: {done}, {now - start:.0f} s; {now - began:.0f} s in all", flush=True)
        report.write()


def parser() -> argparse.ArgumentParser:
    """The options; those that are not here have the values that `gpu_llama.py` gives them."""
    made = argparse.ArgumentParser(description="One CUDA device: training, kernels, losses.")
    made.add_argument("--out", type=Path, default=Path("gpu-out"), help="the folder of gpu.txt, gpu.json and gpu.svg")
    made.add_argument("--seconds", type=float, default=570.0, help="the time of everything together")
    made.add_argument("--parts", default=",".join(PARTS), help=f"with commas, of {', '.join(PARTS)}")
    made.add_argument("--contenders", default="", help="with commas, instead of those of the training")
    made.add_argument("--steps", type=int, default=10, help="timed steps of each contender")
    made.add_argument("--curve", type=int, default=200, help=f"losses that are compared, of {', '.join(CURVES)}")
    made.add_argument("--shape", default="1b")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--deepspeed-path", default="", help="a folder with real DeepSpeed")
    return made


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where something is missing."""
    began = time.monotonic()
    given = parser().parse_args(arguments)
    chosen, contenders = ([each for each in text.split(",") if each] for text in (given.parts, given.contenders))
    if unknown := set(chosen) - set(PARTS):
        parser().error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    options = argparse.Namespace(**{**vars(gpu_llama.parser().parse_args([])), **vars(given), "fresh": True})
    report = Report(given.out)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        measure(plan(chosen, contenders, deepspeed=bool(given.deepspeed_path)), options, report, began)
    except KeyboardInterrupt:
        report.missing["the rest"] = "told to end"
    finally:
        signal.signal(signal.SIGTERM, before)
        report.write()
    print(f"\n{report.text()}\n\n{given.out / 'gpu.svg'} shows it; {time.monotonic() - began:.0f} s in all", flush=True)
    return int(bool(report.missing))


if __name__ == "__main__":
    sys.exit(main())
