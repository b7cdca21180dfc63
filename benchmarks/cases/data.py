"""Data efficiency beside DeepSpeed and Megatron: the sampler's start, random reads of an indexed dataset, the analyzer.

The sampler starts on 100 million samples, all of which its first step allows: it makes one cluster of them and gives a
batch. Memory is anonymous memory, sampled meanwhile; pages of files count for no process. DeepSpeed's collectives do
nothing here, since one rank has no other.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="data",
    title="data efficiency on one rank",
    file=__file__,
    measures=(
        Measure("start", "sampler of 100M samples, to the first batch", "s", targets=(Target(10.0),)),
        Measure("memory", "memory that takes", "MB", targets=(Target(64.0),)),
        Measure(
            "reads",
            "random reads of an indexed dataset",
            "samples/s",
            better="higher",
            targets=(Target(1.0, than="deepspeed:megatron"), Target(1.0, than="deepspeed")),
        ),
        Measure("analyzer", "seqlen of 1M samples, 2 processes", "s", targets=(Target(1.0, than="deepspeed"),)),
    ),
    contenders=("ours", "deepspeed", "deepspeed:megatron"),
    parameters=({"what": "sampler"}, {"what": "reads"}, {"what": "analyzer"}),
    rounds=3,
    timeout_s=1800.0,
)

SAMPLES, VALUES = 100_000_000, 100
ITEMS, LENGTH = 200_000, 512
ANALYZED = 1_000_000


def measure(job: Job) -> dict[str, float]:
    """One of the three; Megatron has only a dataset."""
    what = job.parameters["what"]
    if what == "reads":
        return _reads(job)
    if job.flavour:
        return {}
    return _start(job) if what == "sampler" else _analyzer(job)


def _module(job: Job, name: str) -> Any:
    folder = "deepspeed.data" if job.contender == "ours" else "deepspeed.runtime.data_pipeline.data_sampling"
    ours = {"data_sampler": "sampler", "data_analyzer": "analyzer"}
    return importlib.import_module(f"{folder}.{ours.get(name, name) if job.contender == 'ours' else name}")


def _start(job: Job) -> dict[str, float]:
    import numpy as np

    module, folder = _module(job, "data_sampler"), Path(job.folder)
    if job.contender == "deepspeed":
        module.dist = SimpleNamespace(barrier=lambda group: None, broadcast=lambda *_, **__: None)
    _write_metric(_module(job, "indexed_dataset").MMapIndexedDatasetBuilder, folder, np)
    metric = {
        "index_to_sample_path": str(folder / "samples"),
        "index_to_metric_path": str(folder / "values"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": VALUES,
        "max_difficulty": VALUES,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": str(folder / "clusters"),
        "curriculum_metrics": {"seqlen": metric},
    }
    settings = {"seed": 1, "data_sampling": {"num_epochs": 1, "curriculum_learning": curriculum}}
    with _memory() as used:
        begin = time.perf_counter()
        sampler = module.DeepSpeedDataSampler(settings, SAMPLES, 8, 0, 1, SimpleNamespace(size=lambda: 1), 1, 0)
        next(iter(sampler))
        seconds = time.perf_counter() - begin
    return {"start": seconds, "memory": used[0]}


def _write_metric(builder: Any, folder: Path, np: Any) -> None:
    """Samples in 100 classes of one value each; sample i has the value i % 100 + 1."""
    samples = builder(str(folder / "samples.bin"), dtype=np.uint32)
    values = builder(str(folder / "values.bin"), dtype=np.uint8)
    for value in range(VALUES):
        samples.add_item_numpy(np.arange(value, SAMPLES, VALUES, dtype=np.uint32))
        values.add_item_numpy(np.array([value + 1], dtype=np.uint8))
    samples.finalize(str(folder / "samples.idx"))
    values.finalize(str(folder / "values.idx"))


@contextmanager
def _memory() -> Iterator[list[float]]:
    """How many MB of anonymous memory a block takes at most; the number is there once it ends."""
    found, ended, before = [0.0], threading.Event(), _anonymous()

    def watch() -> None:
        while not ended.wait(0.01):
            found[0] = max(found[0], _anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1000


def _reads(job: Job) -> dict[str, float]:
    import numpy as np

    if job.flavour:
        try:
            module = importlib.import_module("megatron.core.datasets.indexed_dataset")
        except ImportError:
            return {}
        kind, builder = module.IndexedDataset, module.IndexedDatasetBuilder
    else:
        module = _module(job, "indexed_dataset")
        kind, builder = module.MMapIndexedDataset, module.MMapIndexedDatasetBuilder
    import torch

    prefix, chance = str(Path(job.folder) / "texts"), np.random.default_rng(0)
    writer, tokens = builder(f"{prefix}.bin", dtype=np.uint16), torch.arange(LENGTH)
    for _ in range(ITEMS):
        writer.add_item(tokens)
        writer.end_document()
    writer.finalize(f"{prefix}.idx")
    dataset, order = kind(prefix), chance.permutation(ITEMS).tolist()
    for number in order[:1000]:
        dataset[number]
    begin = time.perf_counter()
    for number in order:
        dataset[number]
    return {"reads": ITEMS / (time.perf_counter() - begin)}


class _Lengths:
    """Samples of a length that their first element says."""

    def __len__(self) -> int:
        return ANALYZED

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.tensor([index * 7919 % 4093, index])


def _analyzer(job: Job) -> dict[str, float]:
    import torch

    analyzer = _module(job, "data_analyzer").DataAnalyzer(
        _Lengths(),
        num_threads=2,
        num_threads_reduce=2,
        batch_size=1024,
        metric_names=["seqlen"],
        metric_functions=[lambda batch: batch[:, 0]],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=job.folder,
    )
    begin = time.perf_counter()
    analyzer.run_map()
    analyzer.run_reduce()
    return {"analyzer": time.perf_counter() - begin}
