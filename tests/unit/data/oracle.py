"""Random settings, and the numbers of DeepSpeed 0.19.6 for them, kept in tests/fixtures/data-efficiency-0.19.6.json.

To make these again: `python -m tests.unit.data.oracle <folder of DeepSpeed's sources>`, in a Python that has what
DeepSpeed imports; the library here has the same import name, so that the file runs without it.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parents[2] / "fixtures" / "data-efficiency-0.19.6.json"


def schedules(count: int = 1000) -> list[tuple[dict[str, Any], list[int]]]:
    """Random schedules of a curriculum, each with steps to ask for."""
    chance = random.Random(1)
    found = []
    for _ in range(count):
        kind = chance.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
        low = chance.randint(1, 300)
        high = low + chance.randint(0, 900)
        total = chance.randint(1, 200)
        inner: dict[str, Any] = {"total_curriculum_step": total, "difficulty_step": chance.choice([1, 2, 8, 24])}
        if kind == "fixed_root":
            inner["root_degree"] = chance.randint(1, 5)
        if kind == "fixed_discrete":
            ends = sorted(chance.sample(range(1, 200), chance.randint(1, 5)))
            inner = {"difficulty": sorted(chance.sample(range(1, 500), len(ends) + 1)), "max_step": ends}
            low, high = inner["difficulty"][0], inner["difficulty"][-1]
        steps = [0, 1, *(chance.randint(1, 2 * total) for _ in range(6)), total, total + 1]
        found.append(
            ({"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": inner}, steps)
        )
    return found


def build(kind: Any, path: Path, dtype: str, merged: Path | None = None) -> None:
    """A small dataset with documents and empty items, after it perhaps another one."""
    import numpy as np
    import torch

    builder = kind(f"{path}.bin", dtype=getattr(np, dtype))
    chance = np.random.default_rng(0)
    for number in range(10):
        builder.add_item(torch.tensor(chance.integers(0, 100, chance.integers(0, 9)).astype(np.int64)))
        if number % 3 == 2:
            builder.end_document()
    if merged is not None:
        builder.merge_file_(str(merged))
    builder.finalize(f"{path}.idx")


def datasets(mmap: Any, older: Any, folder: Path) -> dict[str, str]:
    """The bytes of datasets of several kinds."""
    build(mmap, folder / "longs", "int64")
    build(mmap, folder / "words", "uint16")
    build(mmap, folder / "merged", "int64", folder / "longs")
    build(older, folder / "older", "int32")
    build(older, folder / "older_merged", "int32", folder / "older")
    return {path.name: path.read_bytes().hex() for path in sorted(folder.iterdir())}


class Lengths:
    """Samples of which the first element is a length."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.tensor([(index * 7919) % 263 + 1, index % 3, 1])


def analyse(kind: Any, folder: Path) -> None:
    """Two metrics of these, by two workers with two threads."""
    import torch

    options: dict[str, Any] = {
        "num_threads": 2,
        "batch_size": 7,
        "metric_names": ["seqlen", "total"],
        "metric_functions": [lambda data: data[:, 0], lambda data: data.sum(0)],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "metric_dtypes": [torch.int64, torch.int64],
        "save_path": str(folder),
    }
    for worker in (1, 0):
        kind(Lengths(), num_workers=2, worker_id=worker, **options).run_map()
    kind(Lengths(), num_workers=2, worker_id=0, **options).run_reduce()


METRIC_FILES = [
    *("seqlen/seqlen_sample_to_metric", "seqlen/seqlen_index_to_metric", "seqlen/seqlen_index_to_sample"),
    *("seqlen/seqlen_index_to_sample_percentile_merged", "total/total_metric_value"),
]


def contents(kind: Any, folder: Path) -> dict[str, Any]:
    """dtype, sizes and bytes of the items of each file of the metrics."""
    found = {}
    for name in METRIC_FILES:
        each = kind(str(folder / name))
        items = b"".join(bytes(each[number]) for number in range(len(each)))
        found[name] = [each.dtype.__name__, each.sizes.tolist(), items.hex()]
    return found


def main(source: str) -> None:
    sys.path.insert(0, source)
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    found: dict[str, Any] = {}
    found["schedules"] = [
        [CurriculumScheduler(config).get_difficulty(step) for step in steps] for config, steps in schedules()
    ]
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
        IndexedDatasetBuilder,
        MMapIndexedDataset,
        MMapIndexedDatasetBuilder,
    )

    with tempfile.TemporaryDirectory() as name:
        found["datasets"] = datasets(MMapIndexedDatasetBuilder, IndexedDatasetBuilder, Path(name))
    with tempfile.TemporaryDirectory() as name:
        analyse(DataAnalyzer, Path(name))
        found["metrics"] = contents(MMapIndexedDataset, Path(name))
    FIXTURE.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
