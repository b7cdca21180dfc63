"""Random settings, and the numbers of DeepSpeed 0.19.6 for them, kept in tests/fixtures/data-efficiency-0.19.6.json.

To make these again: `python -m tests.unit.data.oracle <folder of DeepSpeed's sources>`, in a Python that has what
DeepSpeed imports; the library here has the same import name, so that the file runs without it. Long results are kept
as digests.

The settings go around the faults of DeepSpeed that are not copied:

- difficulties and kept tokens fall below their minimum where that is no multiple of the step;
- a cluster that a batch asks for more than it holds, twice, makes the batch too short;
- of several metrics one that allows no sample yet counts as one that allows all;
- files of another run in `data_cluster_path` count as clusters of this one;
- the sampler's state has the global random state of numpy instead of its own;
- an iteration goes on for a batch after the last epoch;
- dynamic batching never uses the last sample, and ends at the first pack of fewer than `min_batch_size`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
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


def datasets(mmap: Any, folder: Path) -> dict[str, str]:
    """The bytes of datasets of several kinds."""
    build(mmap, folder / "longs", "int64")
    build(mmap, folder / "words", "uint16")
    build(mmap, folder / "merged", "int64", folder / "longs")
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


def digest(found: Any) -> str:
    """A few letters for a long result."""
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:10]


# ---- the sampler

STEPS = 12


def sampled(count: int = 1100) -> Iterator[dict[str, Any]]:
    """Random datasets with metrics, and settings of a sampler for them; a tenth of them allow no whole batch."""
    chance = random.Random(2)
    for _ in range(count):
        total, metrics = chance.randint(30, 250), {}
        for number in range(chance.choice([1, 1, 2, 3])):
            kind, step = chance.choice(["value", "percentile"]), chance.choice([1, 2, 3])
            values = [1, *(chance.randint(1, 30) for _ in range(total - 1))]
            low, high = step * chance.randint(3, 6), chance.randint(24, 35)
            if kind == "percentile":
                low, high = step * chance.randint(1, 3), chance.randint(14, 25)
            metrics[f"metric{number}"] = {
                "values": values,
                "difficulty_type": kind,
                "clustering_type": chance.choice(["schedule_based", "schedule_based", "single_cluster"]),
                "min_difficulty": low,
                "max_difficulty": high,
                **_schedule(chance, low, high, step),
            }
        yield {
            "total": total,
            "metrics": metrics,
            "seed": chance.randint(0, 2**31),
            "micro": chance.randint(1, 4),
            "ranks": chance.randint(1, 3),
            "accumulation": chance.randint(1, 3),
            "rank": chance.random(),
        }


def _schedule(chance: random.Random, low: int, high: int, step: int) -> dict[str, Any]:
    kind = chance.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
    inner: dict[str, Any] = {"total_curriculum_step": chance.randint(1, 12), "difficulty_step": step}
    if kind == "fixed_root":
        inner["root_degree"] = chance.randint(2, 3)
    if kind == "fixed_discrete":
        ends = sorted(chance.sample(range(1, 11), chance.randint(1, 3)))
        inner = {"difficulty": [low, *sorted(chance.sample(range(low + 1, high), len(ends) - 1)), high]}
        inner["max_step"] = ends
    return {"schedule_type": kind, "schedule_config": inner}


def sample(kind: Any, builder: Any, contents: Callable[..., Any], case: Any, folder: Path) -> str:
    """How many steps a sampler takes until DeepSpeed's falls short, and a digest of difficulties, batches, clusters."""
    metrics = {}
    for name, settings in case["metrics"].items():
        by_value: dict[int, list[int]] = {}
        for number, value in enumerate(settings["values"]):
            by_value.setdefault(value, []).append(number)
        for file, items in (
            ("samples", [by_value[each] for each in sorted(by_value)]),
            ("values", [[each] for each in sorted(by_value)]),
        ):
            each = builder(str(folder / f"{name}_{file}.bin"))
            for item in items:
                each.add_item(_tensor(item))
            each.finalize(str(folder / f"{name}_{file}.idx"))
        metrics[name] = {
            **{key: value for key, value in settings.items() if key != "values"},
            "index_to_sample_path": str(folder / f"{name}_samples"),
            "index_to_metric_path": str(folder / f"{name}_values"),
        }
    section = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": metrics}
    settings = {"seed": case["seed"], "data_sampling": {"num_epochs": 1000, "curriculum_learning": section}}
    ranks, times = case["ranks"], case["accumulation"]
    group, rank = SimpleNamespace(size=lambda: ranks), int(case["rank"] * ranks)
    one = kind(settings, case["total"], case["micro"], rank, ranks, group, times, 0)
    micro, found = iter(one), []
    for _ in range(case.get("steps", STEPS)):
        try:
            one.get_next_global_batch()
        except ValueError:  # no sample is easy enough for all metrics
            break
        if len(one.batch) < case["micro"] * ranks * times:
            break
        found.append([dict(one.current_difficulties), list(one.batch), [next(micro) for _ in range(times)]])
    clusters = [sorted(map(int, each)) for each in contents(one, folder / "clusters")] if len(found) == STEPS else []
    return f"{len(found)}:{digest([found, clusters])}"


def _tensor(items: Sequence[int]) -> Any:
    import torch

    return torch.tensor(items)


# ---- dynamic batching and random layer token drop


def packed(count: int = 1000) -> Iterator[tuple[list[int], int, dict[str, Any]]]:
    """Random lengths, tokens of a micro-batch, and settings to pack them."""
    chance = random.Random(3)
    for _ in range(count):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(20, 90))]
        yield (
            lengths,
            chance.randint(35, 99),
            {
                "sequence_ids_per_mb": chance.choice([None, chance.sample(range(len(lengths)), 18)]),
                "min_batch_size": chance.choice([1, 1, 1, 2]),
                "max_batch_size": chance.choice([None, None, 3]),
                "sequence_picking_order": chance.choice(["dataloader", "random", "seqlen"]),
                "effective_batch_size": chance.randint(1, 3),
                "required_microbatches_of_same_size": chance.choice([False, True]),
                "seed": chance.randint(0, 99),
            },
        )


def packs(function: Callable[..., Any], lengths: Any, tokens: int, settings: Any, batches: int | None = None) -> str:
    """How many batches can be compared, which are all but DeepSpeed's last, and the digest of their packs."""
    try:
        found, sizes, longest = function(lengths, tokens, **settings)
    except AssertionError:
        return "0:"
    many = len(sizes) - 1 if batches is None else batches
    micro = [[int(number), [int(each) for each in ids]] for number, ids in found if number < many]
    return f"{many}:{digest([micro, [int(each) for each in sizes[:many]], [int(each) for each in longest[:many]]])}"


def kept(count: int = 1000) -> Iterator[dict[str, Any]]:
    """Random schedules of kept tokens."""
    chance = random.Random(4)
    for _ in range(count):
        step, layers = chance.choice([1, 8, 16]), chance.randint(3, 40)
        low = step * chance.randint(1, 20)
        yield {
            "enabled": True,
            "total_layer_num": layers,
            "random_ltd_layer_num": (dropping := chance.randint(1, layers - 1)),
            "random_ltd_layer_id": list(range(dropping)),
            "model_mask_name": None,
            "model_type": "decoder",
            "hidden_state_order": "batch_seq_dim",
            "global_batch_size": chance.randint(1, 512),
            "micro_batch_size": 1,
            "layer_token_lr_schedule": {"enabled": False},
            "random_ltd_schedule": {
                "min_value": low,
                "max_value": low + chance.randint(1, 1000),
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": chance.randint(1, 60), "seq_per_step": step},
            },
        }


def tokens(kind: Any, config: dict[str, Any]) -> str:
    """The digest of kept tokens step by step and of the layer tokens of a training."""
    one, found = kind(config), []
    for step in range(65):
        one.update_seq(step)
        found.append([one.get_current_seq(), one.state_dict()["consumed_layer_tokens"]])
    one.reset_to_init()
    return digest([found, one.get_total_layer_tokens(40)])


def main(source: str) -> None:
    sys.path.insert(0, source)
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    found: dict[str, Any] = {}
    found["schedules"] = [
        [CurriculumScheduler(config).get_difficulty(step) for step in steps] for config, steps in schedules()
    ]
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
        MMapIndexedDataset,
        MMapIndexedDatasetBuilder,
    )

    with tempfile.TemporaryDirectory() as name:
        found["datasets"] = datasets(MMapIndexedDatasetBuilder, Path(name))
    with tempfile.TemporaryDirectory() as name:
        analyse(DataAnalyzer, Path(name))
        found["metrics"] = contents(MMapIndexedDataset, Path(name))
    found |= _digests(MMapIndexedDatasetBuilder)
    FIXTURE.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


def _digests(builder: Any) -> dict[str, Any]:
    import deepspeed.runtime.data_pipeline.data_sampling.data_sampler as module
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import batch_by_seqlens

    # its collectives do nothing in a world of one rank, but would compile an extension first
    module.dist = SimpleNamespace(barrier=lambda group: None, broadcast=lambda *_, **__: None)

    def clusters(sampler: Any, _: Path) -> Any:
        return [each[0] for each in sampler.data_clusters]

    def one(case: dict[str, Any]) -> str:
        with tempfile.TemporaryDirectory() as name:
            return sample(module.DeepSpeedDataSampler, builder, clusters, case, Path(name))

    return {
        "samplers": [one(case) for case in sampled()],
        "packs": [packs(batch_by_seqlens, *case) for case in packed()],
        "tokens": [tokens(RandomLTDScheduler, config) for config in kept()],
    }


if __name__ == "__main__":
    main(sys.argv[1])
