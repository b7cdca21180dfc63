"""What rank 0 of a group of any size does in a training step, measured without the others: time, traffic, memory.

Only `measure` of a case imports this file, since it imports torch.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.agreements import agreements, waiting_s
from benchmarks.allocations import Allocations
from benchmarks.case import Job
from benchmarks.quiet import KINDS, Traffic, quiet_group
from benchmarks.training import GPT, Batch, Engine, Loop, decayed_optimizer, fully_sharded

__all__ = ["SHAPE", "count_memory", "measure_rank", "time_steps"]

SHAPE = {"layers": 8, "width": 256, "heads": 4, "vocabulary": 8192, "length": 64}  # 8.4M parameters
MIB = 2**20
WARM_UP = 2  # plans are made in the first steps
LEAST = 2
COUNTABLE_MS = 5e3  # a step that takes longer allocates so often that the records of it would fill the memory
PATIENCE_S = 20.0  # for more steps than the least: a contender may take twenty seconds for one

_KEYS = {
    "stage": ("stage",),
    "persistent": ("stage3_param_persistence_threshold",),
    "bucket": ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}

Make = Callable[[GPT], Loop]


def measure_rank(job: Job, shape: dict[str, int] = SHAPE, most: int = 15) -> dict[str, float]:
    """Every measure of the case, of the contender in `job`; `world` and the keys of ZeRO are its parameters."""
    torch.set_num_threads(1)
    zero = {key: value for name, value in job.parameters.items() for key in _KEYS.get(name, ())}
    make: Make
    if job.flavour == "fsdp2":
        make = _fsdp2
        importlib.import_module("torch.distributed.fsdp")
    else:
        make = _engine(zero)
        importlib.import_module("deepspeed")  # not part of initialize
    batch = _batch(shape)
    with quiet_group(int(job.parameters["world"])) as traffic:
        found = time_steps(make, shape, batch, traffic, most)
        if found["step_ms"] > COUNTABLE_MS:
            return found
        gc.collect()
        return {**found, **count_memory(make, shape, batch)}


def _engine(zero: dict[str, Any]) -> Make:
    return lambda model: Engine(model, 1, make_optimizer=decayed_optimizer, **zero)


def _fsdp2(model: GPT) -> Loop:
    return fully_sharded(model, decayed_optimizer)


def _batch(shape: dict[str, int]) -> Batch:
    torch.manual_seed(1)
    size = (1, shape["length"])
    return torch.randint(shape["vocabulary"], size), torch.randint(shape["vocabulary"], size)


def _model(shape: dict[str, int]) -> GPT:
    torch.manual_seed(0)
    return GPT(**shape)


def time_steps(make: Make, shape: dict[str, int], batch: Batch, traffic: Traffic, most: int) -> dict[str, float]:
    """Host time of initialize and of steps without what collectives took, and the traffic of the last step."""
    twin = _model(shape)
    plain = Loop(twin, twin, decayed_optimizer)
    model = _model(shape)
    traffic.clear()
    began = time.perf_counter()
    contender = make(model)
    init = time.perf_counter() - began - traffic.seconds
    mine: list[float] = []
    beside: list[float] = []
    before = 0
    began = time.perf_counter()
    while len(mine) < WARM_UP + LEAST or (len(mine) < WARM_UP + most and time.perf_counter() - began < PATIENCE_S):
        beside.append(_seconds(plain, batch))
        before = agreements()
        traffic.clear()
        mine.append(_seconds(contender, batch) - traffic.seconds)
    agreed = agreements() - before
    waiting = waiting_s(agreed, dist.get_world_size())
    steady = statistics.median(mine[WARM_UP:])
    return {
        "ratio": steady / statistics.median(beside[WARM_UP:]),
        "step_ms": steady * 1e3,
        "init_ms": init * 1e3,
        "first_ms": mine[0] * 1e3,
        **_shown(traffic),
        **({"agreements": agreed, "agreement_ms": waiting * 1e3} if agreed else {}),
    }


def _seconds(step: Callable[[Batch], None], batch: Batch) -> float:
    began = time.perf_counter()
    step(batch)
    return time.perf_counter() - began


def _shown(traffic: Traffic) -> dict[str, float]:
    """Kinds that do not occur are left out."""
    found: dict[str, float] = {}
    for kind in KINDS:
        if traffic.calls[kind]:
            found |= {f"{kind} calls": float(traffic.calls[kind]), f"{kind} mib": traffic.sent[kind] / MIB}
    return found


def count_memory(make: Make, shape: dict[str, int], batch: Batch) -> dict[str, float]:
    """Peaks of one steady step, by every block that torch's allocator hands out."""
    with Allocations() as allocations:
        contender = make(_model(shape))
        for number in range(WARM_UP + 1):
            with allocations.span(f"forward {number}"):
                loss = contender.forward(batch)
            with allocations.span(f"backward {number}"):
                contender.backward(loss)
            del loss
            with allocations.span(f"update {number}"):
                contender.update()
    last = WARM_UP
    peaks = [allocations.peak(f"{part} {last}") for part in ("forward", "backward", "update")]
    return {
        "backward_mib": (peaks[1] - allocations.before(f"backward {last}")) / MIB,
        "peak_mib": max(peaks) / MIB,
        "kept_mib": allocations.before(f"forward {last}") / MIB,
    }
