"""Sparse attention beside dense flash attention, and Evoformer attention beside its formula, forward with backward.

python -m benchmarks.gpu_attention           # on a CUDA device: time, and memory above that of the inputs
python -m benchmarks.gpu_attention --tiny    # small shapes, on any machine
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.evoformer import DS4Sci_EvoformerAttention
from deepspeed.ops.sparse_attention import BigBirdSparsityConfig, SparseSelfAttention

__all__ = ["main"]


def measured(run: Callable[[], Any], on_gpu: bool, repeat: int) -> tuple[float, float]:
    """Median milliseconds of a call, and the MiB that it takes at its peak."""
    times, peak = [], 0
    for _ in range(3):  # compiles
        run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(times), peak / 2**20


def plain_evoformer(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """The formula as models write it."""
    q, k, v = (each.transpose(2, 3) for each in (query, key, value))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    for bias in biases:
        scores = scores + bias
    return (scores.softmax(-1) @ v).transpose(2, 3)


def trained(forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A forward and its backward."""
    return lambda: torch.autograd.grad(forward().sum(), inputs)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print a line of JSON for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU too")
    tiny = parser.parse_args(words).tiny
    on_gpu = torch.cuda.is_available()
    if not (tiny or on_gpu):
        parser.error("no CUDA device was found; use --tiny for small shapes on the CPU")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    heads, length, width, block = (2, 256, 16, 16) if tiny else (16, 16384, 64, 128)
    sparse = SparseSelfAttention(BigBirdSparsityConfig(heads, block), max_seq_length=length).to(device)
    sequences = [random(1, heads, length, width) for _ in range(3)]
    samples, rows, tokens, heads, width = (1, 8, 32, 2, 8) if tiny else (1, 512, 256, 8, 32)
    cells = [random(samples, rows, tokens, heads, width) for _ in range(3)]
    biases = [random(samples, rows, 1, 1, tokens), random(samples, 1, heads, tokens, tokens)]
    pairs = {
        "bigbird": (
            trained(lambda: sparse(*sequences), sequences),
            trained(lambda: torch.nn.functional.scaled_dot_product_attention(*sequences), sequences),
        ),
        "evoformer": (
            trained(lambda: DS4Sci_EvoformerAttention(*cells, biases), [*cells, *biases]),
            trained(lambda: plain_evoformer(*cells, biases), [*cells, *biases]),
        ),
    }
    for name, runs in pairs.items():
        (ours, own), (theirs, other) = (measured(run, on_gpu, 2 if tiny else 20) for run in runs)
        line = {"case": name, "ms": ours, "plain_ms": theirs, "times": theirs / ours, "mib": own, "plain_mib": other}
        print(json.dumps({key: value if isinstance(value, str) else round(value, 3) for key, value in line.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
