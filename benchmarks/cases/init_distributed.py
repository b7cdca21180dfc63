"""How long it takes to form the process group, everything imported that `import` alone brings."""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.case import Case, Job, Measure

CASE = Case(
    name="init_distributed",
    title="forming the process group (gloo over loopback, variables as torchrun sets them)",
    file=__file__,
    measures=(
        Measure("init_ms", "init_distributed / init_process_group", "ms"),
        Measure("first_ms", "first all_reduce after it", "ms"),
    ),
    ranks=(1, 2),
)


def measure(job: Job) -> dict[str, float]:
    """Milliseconds of the call on this rank, all ranks starting together."""
    # torch is imported here, not above: the runner reads this file for its declaration only
    import torch
    import torch.distributed

    plain = job.contender == "torch"
    package: Any = torch.distributed if plain else importlib.import_module("deepspeed")
    name = "init_process_group" if plain else "init_distributed"
    tensor = torch.ones(1)
    job.line_up("start")
    start = time.perf_counter()
    # looked up within the timed part: what a package postpones until first use is part of the price
    getattr(package, name)("gloo")
    ready = time.perf_counter()
    torch.distributed.all_reduce(tensor)
    end = time.perf_counter()
    torch.distributed.destroy_process_group()
    return {"init_ms": (ready - start) * 1e3, "first_ms": (end - ready) * 1e3}
