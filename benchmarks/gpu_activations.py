"""Forward and backward of checkpointed layers on one CUDA device: their inputs on the device, and in host memory.

    python benchmarks/gpu_activations.py                        # this library
    python benchmarks/gpu_activations.py --path FOLDER          # the deepspeed in that folder, such as the real one
    python benchmarks/gpu_activations.py --device cpu --layers 2 --hidden 64 --tokens 64      # does it run at all?

The layers are those of a Llama without attention, which a sequence of any length only makes slower: so what is shown
of overlap is its hard case. Gradients of all variants must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "table"]

Row = tuple[str, float, float, bool]
"""(variant, seconds, peak bytes, gradients are those of the first)."""


def table(rows: Sequence[Row], moved: int) -> list[str]:
    """One line per variant; `moved` bytes go to the host and come back in a step."""
    base = rows[0][1]
    lines = [f"{'inputs':<22} {'step':>9} {'÷ device':>9} {'peak GiB':>9} {'copied GB/s':>14}  gradients"]
    for name, seconds, peak, equal in rows:
        rate = "" if name == rows[0][0] else f"{2 * moved / seconds / 1e9:.1f}"
        same = "equal" if equal else "DIFFERENT"
        lines.append(
            f"{name:<22} {seconds * 1e3:>6.1f} ms {seconds / base:>9.3f} {peak / 2**30:>9.2f} {rate:>14}  {same}"
        )
    return lines


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Checkpointed layers whose inputs wait on the device or in host memory.")
    made.add_argument("--path", type=Path, default=Path(__file__).resolve().parent.parent, help="where deepspeed is")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--hidden", type=int, default=4096)
    made.add_argument("--tokens", type=int, default=16384)
    made.add_argument("--steps", type=int, default=8)
    return made


def _layers(options: argparse.Namespace) -> list[Any]:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(hidden)
            self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(3 * hidden, hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.norm(x)
            return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))

    torch.manual_seed(0)
    with torch.device(options.device):
        return [Layer(options.hidden).to(torch.bfloat16) for _ in range(options.layers)]


def _timed(layers: Sequence[Any], call: Callable[..., Any], options: argparse.Namespace) -> tuple[float, float, Any]:
    """(median seconds of a step, peak bytes above the weights, the first layer's gradient)."""
    import torch

    cuda = options.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(1)
    x = torch.randn(options.tokens, options.hidden, device=options.device, dtype=torch.bfloat16, requires_grad=True)
    times, base = [], torch.cuda.memory_allocated() if cuda else 0
    for step in range(options.steps + 2):
        if step == 2 and cuda:
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        out = x
        for layer in layers:
            out = call(layer, out)
        out.float().square().mean().backward()
        wait()
        times.append(time.perf_counter() - began)
        gradient = layers[0].up.weight.grad.clone()
        for layer in layers:
            layer.zero_grad()
        del out
    peak = torch.cuda.max_memory_allocated() - base if cuda else 0
    return statistics.median(times[2:]), peak, gradient


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where gradients differ."""
    options = _parser().parse_args(arguments)
    sys.path.insert(0, str(options.path))
    import torch

    import deepspeed

    layers = _layers(options)
    checkpointing: Any = deepspeed.checkpointing
    rows: list[Row] = []
    first = None
    for name, in_cpu in (("on the device", False), ("in host memory", True)):
        checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
        seconds, peak, gradient = _timed(layers, checkpointing.checkpoint, options)
        first = gradient if first is None else first
        rows.append((name, seconds, peak, torch.equal(first, gradient)))
    moved = options.layers * options.tokens * options.hidden * 2
    print(f"deepspeed {deepspeed.__version__}, {options.layers} layers, {moved / 2**30:.2f} GiB of inputs")
    print("\n".join(table(rows, moved)))
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
