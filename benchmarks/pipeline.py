"""Steps of pipelines whose layers sleep: measured, simulated, and by other libraries.

    python -m benchmarks.pipeline --ranks 4 --micro-batches 8

Layers that sleep need no cores, so that the order of passes and the messages are all that is measured. DeepSpeed itself
is measured where `--deepspeed` names a Python that has it. Libraries take turns, `--rounds` times. Each line ends with
what it shows: whether the measured step is within a tenth of the simulated one, and its ratio to that of each other
library, the median over the rounds with half of their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed.pipe.schedule.generators import SCHEDULES, make
from deepspeed.pipe.schedule.simulate import Costs, simulate

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("torch", "DeepSpeed")
ZERO_BUBBLE = ("zb-h1", "zbv", "dualpipev")
CHILD = Path(__file__).with_name("pipeline_child.py")


def run(python: str, case: dict, *, ours: bool) -> float | None:
    """The median seconds of a step; None if the library cannot."""
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randint(20_000, 40_000)),
        "WORLD_SIZE": str(case["ranks"]),
        "LOCAL_SIZE": str(case["ranks"]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment["PYTHONPATH"] = str(ROOT) if ours else ""
    ranks = [
        subprocess.Popen(
            [python, str(CHILD), json.dumps(case)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(case["ranks"])
    ]
    try:
        lines = ranks[0].communicate(timeout=240)[0].splitlines()
    except subprocess.TimeoutExpired:
        lines = []
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [line for line in lines if line.startswith("SECONDS")]
    return statistics.median(json.loads(told[0].removeprefix("SECONDS"))) if told else None


def verdict(here: Sequence[float], simulated: float, others: Mapping[str, Sequence[float]]) -> str:
    """What a line shows; a step that was not measured shows that nothing holds."""
    words = [f"within 10 %: {_word(bool(here) and statistics.median(here) <= 1.1 * simulated)}"]
    words += [f"÷ {name} {compared(here, each)}" for name, each in others.items() if each]
    return ", ".join(words)


def compared(here: Sequence[float], there: Sequence[float]) -> str:
    """The ratio of two libraries that took turns, and whether the first is no slower as far as rounds can tell."""
    ratios = [mine / theirs for mine, theirs in zip(here, there, strict=False)]
    if not ratios:
        return "unknown, no slower: NO"
    ratio, spread = statistics.median(ratios), (max(ratios) - min(ratios)) / 2
    return f"{ratio:.3f} ± {spread:.3f}, no slower: {_word(ratio - spread <= 1)}"


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a rank's F, of its I and of its W")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deepspeed", help="a Python that has DeepSpeed itself")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    given = parser.parse_args()
    print(
        f"{'schedule':12} {'simulated':>10} {'measured':>10} {'ratio':>6} {'torch':>8} {'DeepSpeed':>10}   ms per step"
    )
    steps: dict[str, float] = {}
    for name in given.schedules:
        seconds = given.milliseconds / 1000
        part = seconds / 2  # two layers on each rank
        case = {
            "ranks": given.ranks,
            "micro_batches": given.micro_batches,
            "schedule": name,
            "width": 4,
            "steps": given.steps,
            "layers": [(4, part, part, part)] * (2 * given.ranks),
        }
        simulated = simulate(make(name, given.ranks, given.micro_batches), Costs(seconds, seconds, seconds)).length
        pythons = {"here": sys.executable}
        if name != "zb-h1":
            pythons["torch"] = sys.executable
        if given.deepspeed and name == "1f1b":
            pythons["DeepSpeed"] = given.deepspeed
        found: dict[str, list[float]] = {library: [] for library in pythons}
        for _ in range(given.rounds):
            for library, python in pythons.items():
                step = run(python, {**case, "library": library.lower()}, ours=library == "here")
                found[library] += [] if step is None else [step]
        here = found.pop("here")
        steps[name] = statistics.median(here) if here else float("nan")
        shown = [f"{1000 * statistics.median(found[each]):.0f}" if found.get(each) else "-" for each in OTHERS]
        print(
            f"{name:12} {1000 * simulated:10.0f} {1000 * steps[name]:10.0f} {steps[name] / simulated:6.3f} "
            f"{shown[0]:>8} {shown[1]:>10}   {verdict(here, simulated, found)}",
            flush=True,
        )
    if "1f1b" in steps:
        for name in (each for each in ZERO_BUBBLE if each in steps):
            part = steps[name] / steps["1f1b"]
            print(f"{name} takes {part:.3f} of the step of 1f1b; shorter: {_word(part < 1)}")


if __name__ == "__main__":
    main()
