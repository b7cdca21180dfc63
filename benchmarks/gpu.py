"""Everything about one CUDA device in one run of under ten minutes: kernels, training, where the time goes, losses.

    python benchmarks/gpu.py                         # tables on the standard output, gpu.png and gpu.json beside it
    python benchmarks/gpu.py --parts training,curve --curve 100
    python benchmarks/gpu.py --deepspeed-path FOLDER # real DeepSpeed as well
    python benchmarks/gpu.py --device cpu --shape tiny --parts training,curve --steps 2 --curve 4     # does it run?

`gpu_kernels.py`, `gpu_llama.py` and `breakdown.py` measure; this file puts them in a row. The picture has the speed and
the peak memory of each contender, and its step by kinds of kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import breakdown, gpu_llama  # noqa: E402 - a script's folder is on the path, not the one above

__all__ = ["CONTENDERS", "draw", "main"]

CONTENDERS = (
    "plain",
    "plain-compiled",
    "ours:0",
    "ours:0-fused",
    "ours:3-fused",
    "ours:0-fused-compiled",
    "ours:0-fused-fp8",
    "ours:0-fused-fp8-rows",
)
CURVES = ("plain", "ours:0", "ours:0-fused", "ours:0-fused-fp8")
PARTS = ("kernels", "training", "curve", "8b")


def kernels(options: argparse.Namespace) -> int:
    """Each kernel alone, against a copy; in a process of its own, whose memory is gone afterwards."""
    return subprocess.run([sys.executable, "-m", "benchmarks.gpu_kernels"], cwd=ROOT, check=False).returncode


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Speed, memory and the device's time of every contender."""
    theirs = ("deepspeed:2",) if options.deepspeed_path else ()
    found = gpu_llama.contest([*CONTENDERS, *theirs], options)
    print("\n".join(gpu_llama.table(found)))
    seen = {name: runs[0]["breakdown"] for name, runs in found.items() if runs[0] and runs[0]["breakdown"]}
    if seen:
        print("\n".join(breakdown.lines(seen)))
    return found


def curve(options: argparse.Namespace) -> dict[str, list[float]]:
    """Losses side by side."""
    found = gpu_llama.curves(CURVES, options)
    print("\n".join(gpu_llama.curve_lines(found)))
    return found


def large(options: argparse.Namespace) -> dict[str, Any]:
    """A model of 8.0B parameters, with activation checkpointing."""
    given = argparse.Namespace(**{**vars(options), "shape": "8b", "steps": 4, "breakdown": 0})
    found = gpu_llama.contest(("ours:0-fused", "ours:0-fused-fp8"), given)
    print("\n".join(gpu_llama.table(found)))
    return found


def draw(found: Mapping[str, Any], path: Path) -> bool:
    """Bars of speeds, peaks and kinds of kernels; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    runs = {name: each[0] for name, each in found.items() if each and each[0]}
    places = range(len(runs))
    figure = Figure(figsize=(12, 1.2 + 0.9 * max(len(runs), 2)), layout="constrained")
    speed, memory, time_of = figure.subplots(1, 3, sharey=True)
    speed.barh(places, [run["tokens"] / run["step_s"] for run in runs.values()], color="tab:blue")
    speed.set_xlabel("tokens/s")
    speed.set_yticks(places, list(runs))
    speed.invert_yaxis()
    memory.barh(places, [run["allocated_gib"] for run in runs.values()], color="tab:gray")
    memory.set_xlabel("peak, GiB")
    left = [0.0] * len(runs)
    for kind in breakdown.KINDS:
        spent = [(run["breakdown"] or {"kinds": {}})["kinds"].get(kind, 0.0) for run in runs.values()]
        time_of.barh(places, spent, left=left, label=kind)
        left = [before + more for before, more in zip(left, spent, strict=True)]
    time_of.set_xlabel("ms of the device in a step")
    time_of.legend(fontsize="small")
    figure.savefig(path)
    return True


def parser() -> argparse.ArgumentParser:
    """The options; those that are not here have the values that `gpu_llama.py` gives them."""
    made = argparse.ArgumentParser(description="One CUDA device: kernels, training, losses.")
    made.add_argument("--parts", default=",".join(PARTS), help=f"with commas, of {', '.join(PARTS)}")
    made.add_argument("--steps", type=int, default=10, help="timed steps of each contender")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--curve", type=int, default=100, help="steps of which losses are compared")
    made.add_argument("--shape", default="1b")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--deepspeed-path", default="", help="a folder with real DeepSpeed")
    made.add_argument("--output", type=Path, default=Path(), help="the folder of gpu.png and gpu.json")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where a contender failed."""
    given = parser().parse_args(arguments)
    chosen = [part for part in given.parts.split(",") if part]
    if unknown := set(chosen) - set(PARTS):
        parser().error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    options = argparse.Namespace(**{**vars(gpu_llama.parser().parse_args([])), **vars(given)})
    options.breakdown = int(given.device == "cuda")
    began, found = time.monotonic(), {}
    run = {"kernels": kernels, "training": training, "curve": curve, "8b": large}
    for part in PARTS:
        if part in chosen:
            print(f"\n== {part}", flush=True)
            # times are not those of losses, and the other way round
            scene = argparse.Namespace(**{**vars(options), "curve": given.curve if part == "curve" else 0})
            found[part] = run[part](scene)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    if found.get("training") and not draw(found["training"], given.output / "gpu.png"):
        print("no picture: matplotlib is not installed")
    print(f"{time.monotonic() - began:.0f} s in all")
    return int(
        bool(found.get("kernels"))
        or any(None in runs for part in ("training", "8b") for runs in (found.get(part) or {}).values())
    )


if __name__ == "__main__":
    sys.exit(main())
