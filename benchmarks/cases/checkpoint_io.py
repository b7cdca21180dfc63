"""Saving and loading of checkpoints beside a plain file copy of as many bytes, on the disk of the temporary folder."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="checkpoint_io",
    title="checkpoints of a GPT of 84M parameters, fp32 with Adam, to the disk and back",
    file=__file__,
    measures=(
        Measure(
            "save",
            "save, durable",
            "MiB/s",
            better="higher",
            targets=(Target(0.8, than="torch:copy"), Target(1.0, than="deepspeed")),
        ),
        Measure(
            "load",
            "load",
            "MiB/s",
            better="higher",
            targets=(Target(0.8, than="torch:copy"), Target(1.0, than="deepspeed")),
        ),
        Measure("stall", "save_checkpoint returns after", "ms"),
        Measure("memory", "host memory at the peak of a load, beyond what there is", "MiB"),
        Measure("size", "bytes", "MiB"),
    ),
    contenders=("ours", "ours:safetensors", "ours:background", "deepspeed", "torch:copy"),
    ranks=(2,),
    parameters=({"stage": 1}, {"stage": 3}),
    rounds=3,
    timeout_s=600.0,
)

Acts = tuple[Callable[[str], Any], Callable[[str], Any], Callable[[], None]]
"""Save under a tag, load it, wait until it is written."""

MIB = 2**20
ROUNDS = 3
_SECTIONS: dict[str, dict[str, object]] = {
    "": {},
    "safetensors": {"format": "safetensors"},
    "background": {"writer": {"type": "FAST", "decoupled": True}},
}


def measure(job: Job) -> dict[str, float]:
    """Medians of a few saves and loads; every load finds the files out of the page cache."""
    import torch
    import torch.distributed as dist

    from benchmarks.checkpoints import forget, peak_of

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = Path(job.folder) / "checkpoints"
    if job.flavour == "copy":
        save, load, finish = _copying(job, folder)
    else:
        save, load, finish = _engine(job, folder)
    saves, loads, stalls = [], [], []
    for number in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        save(f"tag{number}")
        stalls.append(time.perf_counter() - began)
        finish()
        _flush(folder, job.rank)
        dist.barrier()
        saves.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in (folder / f"tag{number}").rglob("*"))
        forget(folder)
        dist.barrier()
        began = time.perf_counter()
        memory = peak_of(lambda tag=f"tag{number}": load(tag))
        dist.barrier()
        loads.append(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return {
        "save": size / MIB / statistics.median(saves[1:]),
        "load": size / MIB / statistics.median(loads[1:]),
        "stall": statistics.median(stalls[1:]) * 1e3,
        "memory": memory,
        "size": size / MIB,
    }


def _engine(job: Job, folder: Path) -> Acts:
    """The contender's own calls."""
    from benchmarks.checkpoints import SHAPE, engine_of
    from benchmarks.training import GPT

    engine = engine_of(GPT(**SHAPE), job.parameters["stage"], _SECTIONS[job.flavour])

    def finish() -> None:
        if job.flavour == "background":
            engine._checkpoints.manager.wait()

    return (
        lambda tag: engine.save_checkpoint(str(folder), tag=tag),
        lambda tag: engine.load_checkpoint(str(folder), tag=tag),
        finish,
    )


def _copying(job: Job, folder: Path) -> Acts:
    """Each rank copies a file of its share of the bytes; to load is to read it."""
    share = 3 * 4 * 84 * 10**6 // job.ranks
    origin = Path(job.folder) / f"origin{job.rank}"
    origin.write_bytes(b"\x5a" * share)

    def save(tag: str) -> None:
        (folder / tag).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, folder / tag / f"part{job.rank}")

    def load(tag: str) -> None:
        (folder / tag / f"part{job.rank}").read_bytes()

    return save, load, lambda: None


def _flush(folder: Path, rank: int) -> None:
    """Make everything durable, which ours has done already and costs nothing then."""
    if rank == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
