"""What a call through `deepspeed.comm` costs more than the same call of bare torch.distributed.

Tensors are tiny, so that the way to the collective dominates. Bare and wrapped calls alternate within one process,
one of each at a time, and the median of the pairs' differences counts: a difference of a microsecond between calls of
a hundred would drown otherwise. Plain PyTorch runs the same code with itself as the wrapped side: what that
seems to add, at most, is the resolution of this measurement.
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")

# torch's newer names: the old ones only forward there, after a deprecation warning
NEWER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}

PAIRS = 2000
WARM_UP = 50

CASE = Case(
    name="collective_dispatch",
    title="deepspeed.comm over bare torch.distributed, per call (gloo, 16 bytes a rank)",
    file=__file__,
    measures=(
        *(Measure(f"{name}_added_us", f"{name}: added", "µs", targets=(Target(5.0),)) for name in OPERATIONS),
        Measure("resolution_us", "resolution: bare over bare", "µs"),
        *(Measure(f"{name}_bare_us", f"{name}: bare call", "µs") for name in OPERATIONS),
    ),
    ranks=(1, 2),
    rounds=5,
)


def timed(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call(*arguments)
    return (time.perf_counter_ns() - start) / 1e3


def compare(bare: Callable[..., Any], wrapped: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """(median of a bare call, median of what the wrapped one adds), both in microseconds."""
    bares, differences = [], []
    for number in range(-WARM_UP, PAIRS):
        # each goes first in every other pair: the second call finds warmer caches
        if number % 2:
            first = timed(bare, arguments)
            second = timed(wrapped, arguments)
        else:
            second = timed(wrapped, arguments)
            first = timed(bare, arguments)
        if number >= 0:
            bares.append(first)
            differences.append(second - first)
    return statistics.median(bares), statistics.median(differences)


def measure(job: Job) -> dict[str, float]:
    """Added and bare microseconds of every operation, reported by rank 0."""
    # torch is imported here, not above: the runner reads this file for its declaration only
    import torch
    import torch.distributed as bare

    plain = job.contender == "torch"
    comm: Any = bare if plain else importlib.import_module("deepspeed.comm")
    (comm.init_process_group if plain else comm.init_distributed)("gloo")
    warnings.simplefilter("ignore")
    tensor = torch.zeros(4)  # zeros: sums of sums must not grow
    gathered = torch.zeros(4 * job.ranks)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (tensor,),
        "all_gather_into_tensor": (gathered, tensor),
        "reduce_scatter_tensor": (tensor, gathered),
        "broadcast": (tensor, 0),
        "barrier": (),
    }
    typical: dict[str, float] = {}
    added: dict[str, float] = {}
    for name in OPERATIONS:
        newest = getattr(bare, NEWER.get(name, name), None) or getattr(bare, name)
        wrapped = newest if plain else getattr(comm, name)
        typical[f"{name}_bare_us"], added[f"{name}_added_us"] = compare(newest, wrapped, arguments[name])
    if plain:
        added = {"resolution_us": max(map(abs, added.values()))}
    bare.destroy_process_group()
    return {**typical, **added} if job.rank == 0 else {}
