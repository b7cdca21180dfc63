"""Loading a checkpoint that another number of ranks wrote, beside loading one's own, and the memory that it takes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="checkpoint_reshard",
    title="two ranks load what three ranks wrote: a GPT of 84M parameters, fp32 with Adam",
    file=__file__,
    measures=(
        Measure("ratio", "load of three ranks' ÷ of two ranks'", "×", targets=(Target(1.5),)),
        Measure("own", "load of what two ranks wrote", "ms"),
        Measure("other", "load of what three ranks wrote", "ms"),
        Measure("memory", "host memory at the peak of a load, beyond what the engine holds", "MiB"),
        Measure("share", "bytes that a rank loads", "MiB"),
    ),
    contenders=("ours", "ours:safetensors"),
    ranks=(3,),
    parameters=tuple({"stage": stage} for stage in (1, 2, 3)),
    rounds=3,
    timeout_s=600.0,
)

ROUNDS = 3
READERS = 2


def measure(job: Job) -> dict[str, float]:
    """Three ranks save and two of them load; every load finds the files out of the page cache."""
    import torch.distributed as dist

    from benchmarks.checkpoints import SHAPE, engine_of, forget, peak_of
    from benchmarks.training import GPT

    folder = Path(job.folder)
    dist.init_process_group("gloo")
    section = {"format": "safetensors"} if job.flavour else {}
    engine_of(GPT(**SHAPE), job.parameters["stage"], section).save_checkpoint(str(folder), tag="three")
    dist.barrier()
    dist.destroy_process_group()
    if job.rank >= READERS:
        return {}
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=job.rank, world_size=READERS)
    engine = engine_of(GPT(**SHAPE), job.parameters["stage"], section)
    engine.save_checkpoint(str(folder), tag="two")
    times: dict[str, list[float]] = {"two": [], "three": []}
    memory = 0.0
    for _ in range(ROUNDS + 1):
        for tag, taken in times.items():
            forget(folder)
            dist.barrier()
            began = time.perf_counter()
            memory = max(memory, peak_of(lambda tag=tag: _load(engine, folder, tag)))
            dist.barrier()
            taken.append(time.perf_counter() - began)
    own, other = (statistics.median(taken[1:]) * 1e3 for taken in times.values())
    size = sum(path.stat().st_size for path in (folder / "two").rglob("*"))
    dist.destroy_process_group()
    return {"ratio": other / own, "own": own, "other": other, "memory": memory, "share": size / READERS / 2**20}


def _load(engine: Any, folder: Path, tag: str) -> None:
    engine.load_checkpoint(str(folder), tag=tag)
