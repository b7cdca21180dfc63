"""Rank 0 of 8 and of 64 on one CUDA device: this library, FSDP2 and real DeepSpeed on torch's fake process group.

    PYTHONPATH=.:.gpu-deps python3 -m benchmarks.gpu_scale --deepspeed-path FOLDER --json scale.json
    python3 -m benchmarks.gpu_scale --shapes 7b --worlds 64 --only ours:3,fsdp2 --steps 8
    python3 -m benchmarks.gpu_scale --device cpu --shapes tiny --steps 2       # does it run at all?

It needs torch and transformers and no network. `7b` is a Llama of 7.2B parameters (feed-forward 12,288), sequence 1024,
micro batch 1, activation checkpointing; `1b` that of gpu_llama.py, sequence 4096, micro batch 4. Each contender has a
process of its own. Collectives are not torch's: one copy each, on a stream of its own where the caller waits later, and
counted ([Note: quiet collectives]); so speed is that of a network which costs nothing. `scale_child.py` is what each
process runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.case import Case, Measure, Setting, Value
from benchmarks.processes import Contender, MeasurementError, measure

__all__ = ["PLAN", "Result", "contender_of", "main", "table"]

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("scale_child.py")

MEASURES = (
    Measure("tokens_s", "tokens/s", "tokens/s", better="higher"),
    Measure("first_peak_gib", "peak of the first steps", "GiB"),
    Measure("peak_gib", "peak of steady steps", "GiB"),
    Measure("kept_gib", "after initialize", "GiB"),
    Measure("host_ms", "host", "ms"),
    Measure("collectives", "collectives", ""),
    Measure("sent_gib", "sent", "GiB"),
    Measure("agreement_ms", "agreement", "ms"),
    Measure("build_s", "build", "s"),
    Measure("loss", "loss", ""),
)

# shape → (worlds, contenders); "ours:3-block" has buckets of one decoder layer, "ours:3-compiled" compiled layers,
# "ours:3-zeropp" qwZ, hpZ and qgZ
SEVEN = ("ours:3", "ours:3-zeropp", "ours:3-block", "ours:3-compiled", "fsdp2", "deepspeed:3", "ours:2", "deepspeed:2")
PLAN: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "7b": ((64, 8), SEVEN),
    "1b": ((8,), ("ours:1", "ours:2", "ours:3", "fsdp2", "deepspeed:1", "deepspeed:3")),
    "tiny": (
        (8,),
        ("ours:1", "ours:2", "ours:3", "ours:3-zeropp", "ours:3-block", "fsdp2", "deepspeed:2", "deepspeed:3"),
    ),
}

Result = dict[str, float] | str
"""What was measured, or why nothing was."""
Key = tuple[str, int, str]
"""(shape, world, contender)."""


def contender_of(name: str, deepspeed_path: str, inherited: str) -> Contender:
    """The interpreter is this one; whose `deepspeed` is imported depends on the path alone."""
    entries = [str(Path(entry).resolve()) for entry in inherited.split(os.pathsep) if entry]
    others = [entry for entry in entries if entry != str(ROOT)]
    home = {"ours": [str(ROOT)], "deepspeed": [str(Path(deepspeed_path).resolve())]}.get(name.partition(":")[0], [])
    full = name if ":" in name else f"torch:{name}"
    return Contender(full, sys.executable, {"PYTHONPATH": os.pathsep.join([*home, *others])})


def run(key: Key, options: argparse.Namespace) -> Result:
    """One measurement in a fresh process."""
    shape, world, name = key
    if name.startswith("deepspeed") and not options.deepspeed_path:
        return "no --deepspeed-path"
    parameters: dict[str, Value] = {
        "shape": shape,
        "world": world,
        "device": options.device,
        "steps": options.steps,
        "reentrant": options.reentrant,
    }
    case = Case("gpu_scale", "rank 0 of many", str(CHILD), MEASURES, timeout_s=options.timeout)
    contender = contender_of(name, options.deepspeed_path, os.environ.get("PYTHONPATH", ""))
    try:
        return measure(case, Setting(1, parameters), contender)
    except MeasurementError as error:
        print(f"--- {name}, {shape}, rank 0 of {world}\n{error.output[-6000:]}", flush=True)
        return str(error)


def table(found: dict[Key, list[Result]]) -> list[str]:
    """A line per contender: medians of its rounds, and its speed and memory as a part of FSDP2's."""
    head = f"{'rank 0 of':<12} {'':<14} {'tokens/s':>9} {'÷ fsdp2':>8} {'first':>7} {'steady':>7} {'÷ fsdp2':>8}"
    lines = [
        "peaks in GiB since initialize: of the first steps, of steady ones; sent by a rank in a step, in GiB",
        f"{head} {'kept':>6} {'host ms':>8} {'collectives':>12} {'sent':>7} {'agreement':>10} {'build':>6}",
    ]
    for (shape, world, name), rounds in found.items():
        start = f"{shape + ' ' + format(world, ','):<12} {name:<14}"
        good = medians(rounds)
        if good is None:
            reason = next((result for result in rounds if isinstance(result, str)), "not run")
            lines.append(f"{start} {'-':>9}  {reason}")
            continue
        base = medians(found.get((shape, world, "fsdp2"), []))
        speed = f"{good['tokens_s'] / base['tokens_s']:.3f}" if base else "-"
        room = f"{good['peak_gib'] / base['peak_gib']:.3f}" if base and base["peak_gib"] else "-"
        finite = "" if good["loss"] == good["loss"] else "  loss is not finite"
        lines.append(
            f"{start} {good['tokens_s']:>9,.0f} {speed:>8} {good['first_peak_gib']:>7.2f} {good['peak_gib']:>7.2f} "
            f"{room:>8} {good['kept_gib']:>6.2f} {good['host_ms']:>8.1f} {good['collectives']:>12,.0f} "
            f"{good['sent_gib']:>7.2f} {good['agreement_ms']:>7.2f} ms {good['build_s']:>4.0f} s{finite}"
        )
    return lines


def medians(rounds: Sequence[Result]) -> dict[str, float] | None:
    """Of every measure; None where a round gave none."""
    good = [result for result in rounds if not isinstance(result, str)]
    if not good or len(good) < len(rounds):
        return None
    return {name: statistics.median(result[name] for result in good) for name in good[0]}


def chosen(options: argparse.Namespace) -> list[Key]:
    """What to measure, in turn."""
    keys = []
    for shape in options.shapes.split(","):
        worlds, contenders = PLAN[shape]
        wanted = [int(world) for world in options.worlds.split(",") if world] or worlds
        names = [name for name in options.only.split(",") if name] or contenders
        keys += [(shape, world, name) for world in wanted for name in names]
    return keys


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_scale", description="Rank 0 of many on one device.")
    made.add_argument("--shapes", default="7b,1b", help=f"with commas, of {', '.join(PLAN)}")
    made.add_argument("--worlds", default="", help="numbers of ranks with commas; by default 64,8 and for 1b 8")
    made.add_argument("--only", default="", help="contenders with commas, such as ours:3,ours:3-block,fsdp2")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--steps", type=int, default=8, help="timed steps of each process")
    made.add_argument("--reentrant", action="store_true", help="activation checkpointing with use_reentrant=True")
    made.add_argument("--deepspeed-path", default="", help="a folder with real DeepSpeed")
    made.add_argument("--json", type=Path, help="where to write every number")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where one of ours failed."""
    options = parser().parse_args(arguments)
    found: dict[Key, list[Result]] = {key: [] for key in chosen(options)}
    for _ in range(options.rounds):
        for key, results in found.items():
            if any(isinstance(result, str) for result in results):
                continue
            began = time.monotonic()
            results.append(run(key, options))
            shape, world, name = key
            last = results[-1]
            shown = last if isinstance(last, str) else f"{last['tokens_s']:,.0f} tokens/s"
            print(f"{shape}, rank 0 of {world:,}, {name}: {shown}, {time.monotonic() - began:.0f} s", flush=True)
            if options.json:  # each time: a run may be cut off
                rows = [
                    {"shape": shape, "world": world, "contender": name, "rounds": rounds}
                    for (shape, world, name), rounds in found.items()
                ]
                options.json.write_text(json.dumps({"reentrant": options.reentrant, "found": rows}, indent=1) + "\n")
    print("\n".join(table(found)))
    return int(
        any(isinstance(result, str) for (_, _, name), all_ in found.items() for result in all_ if "ours" in name)
    )


if __name__ == "__main__":
    sys.exit(main())
