"""Trains a Llama of 1.1B parameters on one CUDA device: this library, plain PyTorch, FSDP2 and real DeepSpeed.

    python benchmarks/gpu_llama.py                        # all contenders, each in a process of its own, in rounds
    python benchmarks/gpu_llama.py --contenders plain,ours:3 --rounds 1 --steps 8
    python benchmarks/gpu_llama.py --contenders plain,ours:0-fused --breakdown 12     # which kernels take the time
    python benchmarks/gpu_llama.py --contenders plain,ours:0-fused --curve 200        # do they learn alike?
    python benchmarks/gpu_llama.py --contenders ours:2,ours:2-cpu,ours:3-both --accumulation 4     # states elsewhere
    python benchmarks/gpu_llama.py --profile ours:3       # where the host's time goes
    python benchmarks/gpu_llama.py --two-ranks-gloo       # two ranks on the same device: stages 1 to 3 against 0

It needs torch and transformers and no network; this library is taken from the folder above this file. A step is
forward, backward, clipping and AdamW on fp32 masters of bf16 weights. Every contender starts from the same weights and
sees the same batches, so their losses must agree. `llama_child.py` is what each process runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "REFERENCE",
    "contest",
    "curve_lines",
    "curves",
    "difference",
    "end",
    "main",
    "parser",
    "start",
    "table",
    "two_rank_lines",
    "window_means",
]

CHILD = Path(__file__).with_name("llama_child.py")
MARK = "gpu-llama-result "
DEFAULT = ("plain", "fsdp2", "ours:0", "ours:1", "ours:2", "ours:3")
AGREE = 1e-3  # of a loss; bf16 sums in another order differ by less
AGREE_NORM = 0.05  # of the first gradients' norm; a part of them that is missing, which first losses hide, takes more
START_LIMIT_S = 3.0
WINDOW = 20  # steps whose losses are averaged

# (tokens/s, peak GiB) of real DeepSpeed 0.19.8 and others on an H200, measured before: NOT of this run
REFERENCE = {
    "plain": (54900, 47.1),
    "fsdp2": (53500, 45.3),
    "deepspeed:0": (50600, 47.1),
    "deepspeed:1": (51000, 47.1),
    "deepspeed:2": (50600, 47.1),
    "deepspeed:3": (47300, 50.1),
}


def start(contender: str, options: argparse.Namespace, ranks: int = 1, **changes: Any) -> list[Any]:
    """Run a contender in fresh processes, one per rank.

    Returns the last result of each, with what went wrong afterwards as its `problem`; None where there is no result.
    """
    names = ("shape", "device", "steps", "warm_up", "accumulation", "threshold", "deepspeed_path", "curve")
    task = {"contender": contender, **{name: getattr(options, name) for name in names}, **changes}
    with tempfile.TemporaryDirectory(prefix="gpu-llama-", ignore_cleanup_errors=True) as folder:
        outputs = [Path(folder) / f"output.{rank}" for rank in range(ranks)]
        environment = {**os.environ, **_variables(ranks), **(_caches(Path(folder)) if options.fresh else {})}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as sink:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(CHILD), json.dumps(task)],
                            env={**environment, "RANK": str(rank)},
                            stdin=subprocess.DEVNULL,
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            problem = wait(processes, options.timeout)
        finally:
            end(processes)
        texts = [output.read_text(errors="replace") for output in outputs]
    if problem or task.get("profile"):
        for rank, text in enumerate(texts):
            print(f"--- {contender}, rank {rank}: {problem or 'profile'}\n{text[-8000:]}", flush=True)
    return [_result(text, problem) for text in texts]


def _variables(ranks: int) -> dict[str, str]:
    """What ranks find each other by; all share the first device, which is why LOCAL_RANK is 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    return {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _caches(folder: Path) -> dict[str, str]:
    """Nothing that was compiled before is found, as on a fresh machine."""
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {variable: str(folder / name) for variable, name in names.items()}


def _result(text: str, problem: str) -> Any:
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    if not lines:
        return None
    return json.loads(lines[-1][len(MARK) :]) | ({"problem": problem} if problem else {})


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait for all of them, or for the first that fails. Returns what went wrong."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"exit codes {codes}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            return f"no end within {timeout_s:.0f} s"
        time.sleep(0.05)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave none running, nor what they started: each leads a group of its own."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def contest(contenders: Sequence[str], options: argparse.Namespace) -> dict[str, list[Any]]:
    """Every contender once a round, in turn; one that fails is left out of later rounds."""
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    for turn in range(options.rounds):
        for name in contenders:
            if None in found[name]:
                continue
            began = time.monotonic()
            (result,) = start(name, options, breakdown=options.breakdown > 0 and turn == 0)
            found[name].append(None if result is None or result.get("problem") else result)
            speed = "failed" if result is None else f"{result['tokens'] / result['step_s']:,.0f} tokens/s"
            print(f"round {turn + 1}, {name}: {speed}, {time.monotonic() - began:.0f} s in all", flush=True)
    return found


def difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two series of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def _norm_apart(run: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """How far the norm of the first step's gradients is from the base's; NaN where one of them told none."""
    mine, theirs = run.get("grad_norm"), base.get("grad_norm")
    return float("nan") if mine is None or theirs is None else abs(mine - theirs) / theirs


def table(found: Mapping[str, list[Any]]) -> list[str]:
    """One line per contender: medians over the rounds, the range of the speed, and each target of ours.

    Those that are compiled have to be as good as plain PyTorch is compiled, if that is among them.
    """
    whole = {name: runs for name, runs in found.items() if runs and None not in runs}
    speeds = {name: sorted(run["tokens"] / run["step_s"] for run in runs) for name, runs in whole.items()}
    base = whole.get("plain", [])
    width = max([12, *map(len, found)])
    lines = [
        f"{'contender':<{width}} {'tokens/s':>9} {'(range)':>17} {'÷ plain':>8} {'TFLOP/s':>8} {'peak GiB':>9} "
        f"{'reserved':>9} {'first start':>11} {'host/step':>10} {'losses':>10} {'gradients':>10}  targets"
    ]
    for name, ordered in speeds.items():
        runs = whole[name]
        speed = statistics.median(ordered)
        peak, reserved = (max(run[key] for run in runs) for key in ("allocated_gib", "reserved_gib"))
        began, host = (statistics.median(run[key] for run in runs) for key in ("first_start_s", "host_ms"))
        ratio = speed / statistics.median(speeds["plain"]) if base else float("nan")
        apart = max(difference(run["losses"], base[0]["losses"]) for run in runs) if base else float("nan")
        norms = max((_norm_apart(run, base[0]) for run in runs), default=float("nan")) if base else float("nan")
        missed = []
        compiled = whole.get("plain-compiled", []) if name.endswith(("-compiled", "-deepcompile")) else []
        if name.startswith("ours") and base:
            like = compiled or base
            limit = max([START_LIMIT_S, *(run["first_start_s"] for run in compiled)])
            met = {"speed": speed >= statistics.median(run["tokens"] / run["step_s"] for run in like)}
            met |= {"memory": peak <= max(run["allocated_gib"] for run in like)}
            met |= {"first start": began < limit, "losses": apart <= AGREE}
            met |= {"gradients": not norms > AGREE_NORM}
            missed = [
                f"NOT MET: {', '.join(what for what in met if not met[what])}" if not all(met.values()) else "met"
            ]
        spread, rate = f"{ordered[0]:,.0f}-{ordered[-1]:,.0f}", speed * runs[0]["token_flops"] / 1e12
        lines.append(
            f"{name:<{width}} {speed:>9,.0f} {spread:>17} {ratio:>8.3f} {rate:>8.0f} {peak:>9.2f} {reserved:>9.2f} "
            f"{began:>9.2f} s "
            f"{host:>7.1f} ms {apart:>10.1e} {norms:>10.1e}  {''.join(missed)}"
        )
    return lines + [f"{name:<{width}} failed" for name in found if name not in whole]


def window_means(losses: Sequence[float]) -> list[float]:
    """Means of twenty losses each."""
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


def curve_lines(found: Mapping[str, list[float]]) -> list[str]:
    """Means of twenty steps each, and how far they are from the first contender's at most."""
    means = {name: window_means(losses) for name, losses in found.items()}
    first = next(iter(means.values()))
    shown = [round(place * (len(first) - 1) / 4) for place in range(5)] if len(first) >= 5 else range(len(first))
    heads = "".join(f"{f'to {WINDOW * (place + 1)}':>10}" for place in shown)
    lines = [f"{'loss, means of 20':<24}{heads}   furthest from {next(iter(means))}"]
    for name, values in means.items():
        apart = difference(values, first)
        lines.append(f"{name:<24}" + "".join(f"{values[place]:>10.4f}" for place in shown) + f"   {apart:.1e}")
    return lines


def curves(contenders: Sequence[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """The losses of every contender that runs through."""
    found = {}
    for name in contenders:
        (result,) = start(name, options)
        if result is not None and not result.get("problem"):
            found[name] = result["curve"]
    return found


def two_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Ranks that share one device, over gloo (NCCL refuses it): every stage must give the losses of stage 0."""
    found: dict[str, Any] = {}
    for stage, threshold in ((0, None), (1, None), (2, None), (3, None), (3, 0)):
        label = f"stage {stage}" + ("" if threshold is None else ", nothing whole")
        found[label] = start(f"ours:{stage}", options, ranks=2, threshold=threshold)
        print(f"{label}: {'failed' if None in found[label] else 'done'}", flush=True)
    return found


def two_rank_lines(found: Mapping[str, list[Any]]) -> list[str]:
    """Losses against stage 0, and what the allocator did, per stage; the ranks see different data."""
    lines = [f"{'two ranks':<24} {'loss − stage 0':>15} {'peak MiB':>9} {'reserved':>9} {'retries':>8} {'step':>9}"]
    for label, ranks in found.items():
        if any(result is None for result in ranks):
            lines.append(f"{label:<24} failed")
            continue
        base = found["stage 0"]
        known = all(result is not None for result in base)
        apart = max(difference(a["losses"], b["losses"]) for a, b in zip(ranks, base, strict=True)) if known else None
        shown = "unknown" if apart is None else "identical" if apart == 0 else f"{apart:.1e}"
        peaks = [max(result[key] for result in ranks) * 1024 for key in ("allocated_gib", "reserved_gib")]
        retries = max(result["alloc_retries"] for result in ranks)
        step = max(result["step_s"] for result in ranks)
        lines.append(f"{label:<24} {shown:>15} {peaks[0]:>9,.0f} {peaks[1]:>9,.0f} {retries:>8} {step * 1e3:>6.0f} ms")
    return lines


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description="A Llama of 1.1B parameters on one CUDA device.")
    made.add_argument("--contenders", default="", help=f"with commas; by default {','.join(DEFAULT)}")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--steps", type=int, default=15, help="timed steps of each process")
    made.add_argument("--warm-up", type=int, default=6, help="at least 5, whose losses are compared")
    made.add_argument("--accumulation", type=int, default=1, help="micro batches of a step")
    made.add_argument("--threshold", type=int, help="stage3_param_persistence_threshold")
    made.add_argument("--deepspeed-path", default="", help="a folder with real DeepSpeed; adds it to the contenders")
    made.add_argument("--json", type=Path, help="where to write every number")
    made.add_argument("--profile", nargs="?", const="ours:3", default="", metavar="CONTENDER")
    made.add_argument(
        "--breakdown", type=int, default=0, metavar="N", help="time per kind of kernel, and the N longest"
    )
    made.add_argument("--curve", type=int, default=0, metavar="N", help="losses of N steps beside those of the first")
    made.add_argument("--two-ranks-gloo", action="store_true")
    made.add_argument("--shape", default=None, help="1b, 3b, two-ranks or tiny; see llama_child.py")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument(
        "--fresh", action="store_true", help="with no compiled kernel in any cache, as on a fresh machine"
    )
    made.add_argument("--timeout", type=float, default=150.0, help="seconds for one process")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where a contender failed."""
    options = parser().parse_args(arguments)
    options.shape = options.shape or ("two-ranks" if options.two_ranks_gloo else "1b")
    found: dict[str, Any]
    if options.profile:
        found = {options.profile: start(options.profile, options, profile=True)}
    elif options.two_ranks_gloo:
        found = two_ranks(options)
        print("\n".join(two_rank_lines(found)))
    else:
        theirs = [f"deepspeed:{stage}" for stage in range(4)] if options.deepspeed_path else []
        chosen = [name for name in options.contenders.split(",") if name] or [*DEFAULT, *theirs]
        if options.curve:
            losses = curves(chosen, options)
            print("\n".join(curve_lines(losses)))
            return int(len(losses) < len(chosen))
        found = contest(chosen, options)
        print("\n".join(table(found)))
        seen = {name: runs[0]["breakdown"] for name, runs in found.items() if runs[0] and runs[0]["breakdown"]}
        if seen:
            sys.path.append(str(CHILD.parent.parent))
            from benchmarks.breakdown import lines

            print("\n".join(lines(seen, options.breakdown)))
        if options.shape == "1b" and not theirs:
            print("\nfor comparison, measured EARLIER on an H200, NOT in this run (DeepSpeed is 0.19.8):")
            print("\n".join(f"{name:<12} {speed:>9,} {peak:>27.1f} GiB" for name, (speed, peak) in REFERENCE.items()))
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "found": found}, indent=1) + "\n")
    return int(any(run is None or run.get("problem") for runs in found.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
