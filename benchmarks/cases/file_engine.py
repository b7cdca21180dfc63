"""The file engine beside `fio` with the same block size and depth, on the disk of the temporary folder.

Disks of shared machines change their speed from second to second, so that the library and fio take many turns in one
process, on one file, and what counts is the ratio of their medians. fio is tried with libaio and with io_uring; the
yardstick is the one that is faster there.

On a virtual disk the memory counts for more than the blocks: equal buffers of one process were read into at 2.0 to 4.2
GB/s, by a plain preadv as by the library, and stay at their speed for a while. fio moves the whole file through block
size × depth bytes, which it finds anew in every turn. So does the library here, or one buffer would decide a run.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

_MET = (Target(0.9),)

CASE = Case(
    name="file_engine",
    title="files of 256 MiB past the page cache, beside fio",
    file=__file__,
    measures=(
        Measure("read", "read, ÷ fio", "×", better="higher", targets=_MET),
        Measure("write", "write, ÷ fio", "×", better="higher", targets=_MET),
        Measure("read_speed", "read", "GB/s", better="higher"),
        Measure("write_speed", "write", "GB/s", better="higher"),
        Measure("fio_read_speed", "fio's read", "GB/s", better="higher"),
        Measure("fio_write_speed", "fio's write", "GB/s", better="higher"),
    ),
    # real DeepSpeed compiles its op for minutes at the first use
    contenders=("ours", "deepspeed"),
    parameters=(
        {"block": 2**20, "depth": 8},
        {"block": 2**20, "depth": 32},
        {"block": 2**17, "depth": 32},
    ),
    rounds=1,
    timeout_s=1200.0,
)

SIZE = 2**28
REPEATS = 15
ENGINES = ("libaio", "io_uring")


def measure(job: Job) -> dict[str, float]:
    """Medians of turns: the handle, fio with libaio, fio with io_uring; first all writes, then all reads."""
    import torch

    from deepspeed.ops.op_builder import AsyncIOBuilder

    if shutil.which("fio") is None:
        raise FileNotFoundError("fio is not on PATH; install it (package fio)")
    path = str(Path(job.folder) / "file")
    handle = AsyncIOBuilder().load().aio_handle(job.parameters["block"], job.parameters["depth"], False, True, 1)
    size = job.parameters["block"] * job.parameters["depth"]
    buffers = [handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)) for _ in range(REPEATS)]
    _through(handle, handle.async_pwrite, buffers[0], path)  # blocks of the file are found once, by nobody's turn
    numbers: dict[str, float] = {}
    for way, move in (("write", handle.async_pwrite), ("read", handle.async_pread)):
        mine, fio = [], {engine: [] for engine in ENGINES}
        for buffer in buffers:
            buffer.random_()
            mine.append(_through(handle, move, buffer, path))
            for engine, speeds in fio.items():
                speeds.append(_fio(path, way, engine, job.parameters))
        theirs = max(statistics.median(speeds) for speeds in fio.values())
        numbers |= {way: statistics.median(mine) / theirs, f"{way}_speed": statistics.median(mine)}
        numbers[f"fio_{way}_speed"] = theirs
    return numbers


def _through(handle: Any, begin: Callable[..., int], buffer: Any, path: str) -> float:
    """GB/s of the whole file, all requests at once."""
    began = time.perf_counter()
    for offset in range(0, SIZE, buffer.nbytes):
        begin(buffer, path, offset)
    handle.wait()
    return SIZE / (time.perf_counter() - began) / 1e9


def _fio(path: str, way: str, engine: str, parameters: dict[str, int]) -> float:
    """GB/s as fio tells it: of the transfers alone, without its start."""
    options = {
        "name": "turn",
        "filename": path,
        "size": SIZE,
        "bs": parameters["block"],
        "iodepth": parameters["depth"],
        "ioengine": engine,
        "rw": way,
        "direct": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"]) / 1e9
