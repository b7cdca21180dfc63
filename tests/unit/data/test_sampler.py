"""Batches of the sampler, packs and kept tokens of 1,000 random settings each against DeepSpeed's digests."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
from pathlib import Path

import numpy as np
import pytest

from deepspeed.data import sampler as module
from deepspeed.data.dynamic_batching import batch_by_seqlens
from deepspeed.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder, write_indexed
from deepspeed.data.random_ltd import RandomLTDScheduler
from deepspeed.data.sampler import DeepSpeedDataSampler
from tests.unit.data.oracle import FIXTURE, kept, packed, packs, sample, sampled, tokens


def clusters(sampler: DeepSpeedDataSampler, folder: Path) -> list:
    return [MMapIndexedDataset(str(folder / path))[0] for path in sampler.data_cluster_paths]


@pytest.mark.parametrize("every", [20, 1])
def test_difficulties_batches_and_clusters_are_those_of_deepspeed(tmp_path, every):
    expected = json.loads(FIXTURE.read_text())["samplers"]
    for number, (case, found) in enumerate(zip(sampled(), expected, strict=True)):
        if number % every:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        case["steps"] = int(found.partition(":")[0])
        assert sample(DeepSpeedDataSampler, MMapIndexedDatasetBuilder, clusters, case, folder) == found, case


def test_packs_are_those_of_deepspeed():
    expected = json.loads(FIXTURE.read_text())["packs"]
    for case, found in zip(packed(), expected, strict=True):
        batches = int(found.partition(":")[0])
        if not batches:
            continue
        assert packs(batch_by_seqlens, *case, batches) == found, case


def test_kept_tokens_are_those_of_deepspeed():
    expected = json.loads(FIXTURE.read_text())["tokens"]
    for config, found in zip(kept(), expected, strict=True):
        assert tokens(RandomLTDScheduler, config) == found, config


def of_many(folder: Path, total: int, metrics: int) -> DeepSpeedDataSampler:
    """A sampler of so many samples, half of which are allowed at first; without metrics all are."""
    numbers, found = np.arange(total, dtype=np.uint32), {}
    for name, order in (("last", numbers.reshape(-1, 100).T.ravel()), ("first", numbers))[:metrics]:
        write_indexed(str(folder / f"{name}_samples"), [order], np.full(100, total // 100))
        write_indexed(str(folder / f"{name}_values"), [np.arange(100)], np.ones(100))
        found[name] = {
            "index_to_sample_path": str(folder / f"{name}_samples"),
            "index_to_metric_path": str(folder / f"{name}_values"),
            "difficulty_type": "value",
        }
    found = found or {"any": {"clustering_type": "single_cluster", "difficulty_type": "value"}}
    for each in found.values():
        schedule = {"difficulty": [49, 99], "max_step": [2]}
        each |= {"min_difficulty": 49, "max_difficulty": 99, "schedule_type": "fixed_discrete"}
        each["schedule_config"] = schedule
    section = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": found}
    settings = {"seed": 7, "data_sampling": {"num_epochs": 9, "curriculum_learning": section}}
    return DeepSpeedDataSampler(settings, total, 4, 0, 1, None, 2, 0)


def taken(sampler: DeepSpeedDataSampler, count: int) -> list[list[int]]:
    return list(itertools.islice(iter(sampler), count))


def limited(sampler: DeepSpeedDataSampler, limit: int) -> None:
    """Draw three batches with so much more memory than now."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    bound = int(used.split()[1]) * 1024 + limit
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    assert len(set(np.concatenate(taken(sampler, 6)).tolist())) > 20


@pytest.mark.parametrize("metrics", [0, 1, 2])
def test_a_large_dataset_needs_little_memory(tmp_path, metrics):
    one = of_many(tmp_path, 8_000_000, metrics)
    process = multiprocessing.get_context("fork").Process(target=limited, args=(one, 24 << 20))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("metrics", [0, 1, 2])
def test_clusters_that_are_not_shuffled_have_each_sample_once_and_resume(tmp_path, monkeypatch, metrics):
    monkeypatch.setattr(module, "_SHUFFLED", 0)
    whole = taken(of_many(tmp_path, 400, metrics), 300)
    first = np.concatenate(whole[:4]).tolist()
    assert all(each % 100 < 50 or metrics == 0 for each in first)
    assert all(each < 200 or metrics != 2 for each in first)
    if metrics == 0:
        assert sorted(np.concatenate(whole[:100]).tolist()) == list(range(400))
        assert sorted(np.concatenate(whole[100:200]).tolist()) == list(range(400))
        assert whole[:100] != whole[100:200]
    for stop in (1, 5, 151):
        one, again = of_many(tmp_path, 400, metrics), of_many(tmp_path, 400, metrics)
        taken(one, stop)
        again.load_state_dict(one.state_dict())
        assert taken(again, 300 - stop) == whole[stop:]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 70_000])
def test_a_permutation_has_each_number_once(size):
    one, other = (module._Permutation(size, name)(np.arange(size)) for name in ("one", "other"))
    assert sorted(one.tolist()) == list(range(size))
    assert size < 64 or (one.tolist() != other.tolist() and abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.4)
