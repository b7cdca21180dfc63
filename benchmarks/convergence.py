"""Losses of a small GPT with fewer bytes between ranks, beside those of the same training uncompressed.

    deepspeed --num_gpus 4 benchmarks/convergence.py --steps 600 --seeds 2 --output convergence

The model and the text are those of examples/gpt; two ranks count as a node. Of each way the table has the mean loss of
the last tenth of the steps over all seeds, divided by that of the plain training with the same optimizer. Writes
`convergence.json` with every loss, and `convergence.svg`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import deepspeed
from deepspeed import comm

__all__ = ["WAYS", "draw", "main", "table"]

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
LAMB = {"type": "Lamb", "params": {"lr": 4e-3, "weight_decay": 0.01}}
ZEROPP = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}


def _one_bit(kind: str, **params: Any) -> dict[str, Any]:
    base = LAMB if kind == "OneBitLamb" else ADAM
    return {"type": kind, "params": {**base["params"], **params}}


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AdamW": ("AdamW", ADAM, {"stage": 3}),
    "qwZ + hpZ + qgZ": ("AdamW", ADAM, ZEROPP),
    "qwZ + hpZ + qgZ, LoCo": ("AdamW", ADAM, {**ZEROPP, **LOCO}),
    "MiCS": ("AdamW", ADAM, {"stage": 3, "mics_shard_size": 2}),
    "1-bit Adam": ("AdamW", _one_bit("OneBitAdam", freeze_step=0.2), {"stage": 0}),
    "0/1 Adam": ("AdamW", _one_bit("ZeroOneAdam", var_freeze_step=0.3, local_step_scaler=0.2), {"stage": 0}),
    "LAMB": ("LAMB", LAMB, {"stage": 3}),
    "1-bit LAMB": ("LAMB", _one_bit("OneBitLamb", freeze_step=0.2), {"stage": 0}),
}
"""Name → (what it is compared with, optimizer, keys of ZeRO); parts of one are of all steps."""
COLOURS = ("#3b76c4", "#d9622b", "#8d5bb5", "#4c9a52", "#c0a030", "#4aa5a8", "#777777", "#b03060")


def train(way: str, seed: int, steps: int, batch: int) -> list[float]:
    """The loss of each step, the mean over ranks."""
    _, optimizer, zero = WAYS[way]
    params = {name: _steps(name, value, steps) for name, value in optimizer["params"].items()}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {**optimizer, "params": params},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero} if zero["stage"] == 3 else zero,
    }
    torch.manual_seed(seed)
    data, gpt = _example("data"), _example("model")
    shape = gpt.Shape()
    engine, *_ = deepspeed.initialize(model=gpt.GPT(shape), config=config)
    windows = data.Windows(data.read(data.source_files())[0], shape.context)
    sampler: Any = DistributedSampler(windows, seed=seed)
    losses: list[float] = []
    for tokens, following in DataLoader(windows, batch, sampler=sampler):
        loss = engine(tokens.to(engine.device), following.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        comm.all_reduce(mean)
        losses.append(float(mean) / comm.get_world_size())
        if len(losses) == steps:
            break
    engine.destroy()
    return losses


def _example(name: str) -> Any:
    """A module of examples/gpt."""
    known = f"examples_gpt_{name}"
    if known not in sys.modules:
        path = Path(__file__).resolve().parent.parent / "examples" / "gpt" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None, "the file is there"
        assert spec.loader is not None, "the file is there"
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def _steps(name: str, value: Any, steps: int) -> Any:
    return max(1, round(value * steps)) if name.endswith(("_step", "_scaler")) and isinstance(value, float) else value


def table(found: dict[str, list[list[float]]]) -> list[str]:
    """A line for each way: its last loss, and how far that is from the plain one's."""
    last = {way: sum(map(_last, runs)) / len(runs) for way, runs in found.items()}
    lines = [f"{'':<24}{'loss':>8}{'÷ plain':>10}"]
    for way, loss in last.items():
        base = last.get(WAYS[way][0])
        lines.append(f"{way:<24}{loss:>8.4f}" + (f"{loss / base:>10.4f}" if base else ""))
    return lines


def _last(losses: list[float]) -> float:
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def draw(found: dict[str, list[list[float]]], width: int = 760, height: int = 420) -> str:
    """Means over seeds, each point the mean of a fiftieth of the steps."""
    curves = {}
    for way, runs in found.items():
        means = [sum(each) / len(each) for each in zip(*runs, strict=True)]
        size = max(1, len(means) // 50)
        curves[way] = [sum(part) / len(part) for part in (means[at : at + size] for at in range(0, len(means), size))]
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    for mark in (low, (low + high) / 2, high):
        y = _height(mark, low, high, height)
        drawn.append(f'<line x1="50" x2="{width - 190}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        drawn.append(f'<text x="6" y="{y + 4:.1f}" font-size="12">{mark:.2f}</text>')
    for number, (way, curve) in enumerate(curves.items()):
        step = (width - 240) / max(1, len(curve) - 1)
        points = " ".join(f"{50 + i * step:.1f},{_height(v, low, high, height):.1f}" for i, v in enumerate(curve))
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        drawn.append(f'<text x="{width - 180}" y="{30 + 18 * number}" font-size="12" fill="{colour}">{way}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _height(value: float, low: float, high: float, height: int) -> float:
    return 20 + (high - value) / max(high - low, 1e-9) * (height - 50)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="windows of each rank and step")
    parser.add_argument("--only", default="", help=f"with semicolons, of {'; '.join(WAYS)}")
    parser.add_argument("--output", type=Path, default=Path("convergence"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args(arguments)
    deepspeed.init_distributed(verbose=False)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # ranks of a pretended node, for what is built from now on
    found: dict[str, list[list[float]]] = {}
    for way in [each.strip() for each in args.only.split(";") if each] or WAYS:
        for seed in range(args.seeds):
            found.setdefault(way, []).append(train(way, seed, args.steps, args.batch))
        if comm.get_rank() == 0:
            print("\n".join(table(found)[-1:]), flush=True)
            args.output.with_suffix(".json").write_text(json.dumps(found) + "\n")
            args.output.with_suffix(".svg").write_text(draw(found))
    if comm.get_rank() == 0:
        print("\n".join(table(found)))
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
