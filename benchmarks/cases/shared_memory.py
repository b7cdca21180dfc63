"""Collectives of ranks of one host through memory that they share against gloo's sockets, alternating in one run."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.case import Case, Job, Measure, Target

SIZE = 16 << 20  # bytes
PAIRS = 30

CASE = Case(
    name="shared_memory",
    title="collectives of 16 MiB on one host: gloo's time ÷ ours",
    file=__file__,
    measures=(
        Measure("all_reduce", "all-reduce", "×", better="higher", targets=(Target(3.0),)),
        Measure("all_gather", "all-gather", "×", better="higher", targets=(Target(3.0),)),
        Measure("reduce_scatter", "reduce-scatter", "×", better="higher", targets=(Target(3.0),)),
    ),
    ranks=(2,),
    rounds=3,
    contenders=("ours",),
)


def measure(job: Job) -> dict[str, float]:
    """The ratio of the shortest times."""
    import torch
    import torch.distributed as td

    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    line, part = torch.ones(SIZE // 4), torch.ones(SIZE // 4 // job.ranks)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: td.all_reduce(line), lambda: comm.all_reduce(line)),
        "all_gather": (
            lambda: td.all_gather_into_tensor(line, part),
            lambda: comm.all_gather_into_tensor(line, part),
        ),
        "reduce_scatter": (
            lambda: td.reduce_scatter_tensor(part, line),
            lambda: comm.reduce_scatter_tensor(part, line),
        ),
    }
    found = {}
    for name, (theirs, ours) in calls.items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(PAIRS):
            line.fill_(1.0)
            for call, own in zip((theirs, ours), times, strict=True):
                td.barrier()
                start = time.perf_counter()
                call()
                own.append(time.perf_counter() - start)
        found[name] = min(times[0]) / min(times[1])
    comm.destroy_process_group()
    return found if job.rank == 0 else {}
