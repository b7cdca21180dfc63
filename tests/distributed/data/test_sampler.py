"""The sampler by difficulty: what it may draw, resuming to the sample on any number of ranks, kills while it writes."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.data.sampler import DeepSpeedDataSampler
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import shared_ranks, store_path
from tests.kills import count, killed_at
from tests.unit.data.oracle import Lengths, analyse

TOTAL = len(Lengths())
VALUES = np.array([(index * 7919) % 263 + 1 for index in range(TOTAL)])


def config(folder: Path, **metric) -> dict:
    found = {
        "index_to_sample_path": str(folder / "metrics/seqlen/seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "metrics/seqlen/seqlen_index_to_metric"),
        "difficulty_type": "value",
        "min_difficulty": 20,
        "max_difficulty": 264,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
        **metric,
    }
    section = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": {"seqlen": found}}
    return {"seed": 7, "data_sampling": {"num_epochs": 4, "curriculum_learning": section}}


def sampler(section: dict, rank: int = 0, size: int = 1, steps: int = 2, total: int = TOTAL, batch: int = 16):
    return DeepSpeedDataSampler(section, total, batch // size // steps, rank, size, None, steps, rank)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    analyse(DataAnalyzer, folder / "metrics")
    return folder


def taken(one, count: int) -> list[list[int]]:
    return list(itertools.islice(iter(one), count))


def test_samples_are_as_easy_as_the_step_says(place):
    one = sampler(config(place), steps=1)
    for _ in range(12):
        one.batch = []
        one.get_next_global_batch()
        assert len(one.batch) == 16
        assert VALUES[one.batch].max() <= one.current_difficulties["seqlen"]
    clusters = [MMapIndexedDataset(str(place / "clusters" / path))[0] for path in one.data_cluster_paths]
    together = np.concatenate(clusters)
    assert sorted(together.tolist()) == list(range(TOTAL)), "each sample lies in one cluster"
    assert [
        int(VALUES[each].max()) <= bound for each, bound in zip(clusters, [60, 100, 140, 180, 220, 264], strict=True)
    ]
    shared = sampler(config(place, difficulty_type="percentile", min_difficulty=10, max_difficulty=100), steps=1)
    shared.get_next_global_batch()
    limit = shared.current_difficulties["seqlen"] * (TOTAL // 100)
    assert VALUES[shared.batch].max() <= np.sort(VALUES)[limit - 1]


def test_several_metrics_allow_what_all_of_them_allow(place):
    section = config(place)
    metrics = section["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    metrics["rank"] = {**metrics["seqlen"], "difficulty_type": "percentile", "min_difficulty": 4, "max_difficulty": 100}
    one = sampler(section, steps=1)
    for _ in range(8):
        one.get_next_global_batch()
        allowed = set(np.argsort(VALUES, kind="stable")[: max(one.current_difficulties["rank"], 1) * (TOTAL // 100)])
        assert VALUES[one.batch].max() <= one.current_difficulties["seqlen"]
        assert set(one.batch) <= allowed | (set(range(TOTAL)) if one.current_difficulties["rank"] == 100 else set())
    together = np.concatenate(
        [MMapIndexedDataset(str(place / "clusters" / path))[0] for path in one.data_cluster_paths]
    )
    assert len(set(together.tolist())) == len(together) == TOTAL


def test_a_resumed_sampler_gives_what_comes_next_on_any_number_of_ranks(place):
    section = config(place)
    whole = taken(sampler(section), 130)
    for stop in (0, 1, 2, 7, 60, 101):
        one = sampler(section)
        assert taken(one, stop) == whole[:stop]
        state = one.state_dict()
        again = sampler(section)
        again.load_state_dict(state)
        assert taken(again, 130 - stop) == whole[stop:]
        two = [sampler(section, rank, 2, steps=2 - stop % 2) for rank in range(2)]
        for each in two:
            each.load_state_dict(state)
        parts = [taken(each, 6) for each in two]
        rows = [sample for pair in zip(*parts, strict=True) for part in pair for sample in part]
        expected = [sample for batch in whole[stop:] for sample in batch]
        assert rows[:40] == expected[:40]


def test_a_kill_while_a_cluster_is_written_changes_nothing(place):
    def fresh() -> dict:
        section = config(place)
        section["data_sampling"]["curriculum_learning"]["data_cluster_path"] = tempfile.mkdtemp(dir=place)
        return section

    expected = taken(sampler(config(place)), 12)
    acts = count(lambda: taken(sampler(fresh()), 12))
    for number in range(1, acts + 1, 3):
        section = fresh()
        assert killed_at(number, lambda section=section: taken(sampler(section), 12))
        assert taken(sampler(section), 12) == expected


def test_wrong_files_and_clusters_are_named(place):
    with pytest.raises(DeepSpeedConfigError, match=r"seqlen.index_to_sample_path is '/none'.*analyzer"):
        sampler(config(place, index_to_sample_path="/none"))
    with pytest.raises(DeepSpeedConfigError, match=r"lists of samples and .* values of another dataset"):
        sampler(config(place, index_to_metric_path=str(place / "metrics/seqlen/seqlen_sample_to_metric")))
    with pytest.raises(DeepSpeedConfigError, match="names 500 samples, and the dataset has 9"):
        sampler(config(place), total=9)
    with pytest.raises(DeepSpeedConfigError, match="is of another config"):
        one = sampler(config(place))
        taken(one, 1)
        sampler(config(place, max_difficulty=128)).load_state_dict(one.state_dict())


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((12, 4), float(VALUES[index]))


@shared_ranks(1, 2)
def test_an_engine_trains_on_it_and_resumes_bit_equal():
    folder, world = Path(store_path()).parent, dist.get_world_size()
    if dist.get_rank() == 0:
        analyse(DataAnalyzer, folder / "metrics")
    dist.barrier()
    section = config(folder, cut_batches=True, min_difficulty=4, max_difficulty=12)
    section["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["seqlen"]["clustering_type"] = (
        "single_cluster"
    )
    section["data_sampling"]["num_workers"] = 0

    def build():
        torch.manual_seed(0)
        settings = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 8 // world // 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
            "data_efficiency": section,
        }
        return deepspeed.initialize(model=nn.Linear(4, 1), training_data=Rows(), config=settings)[0]

    def train(engine, count):
        seen = []
        for _ in range(2 * count):
            batch = next(engine.training_dataloader)
            seen.append((tuple(batch.shape), float(batch.sum())))
            engine.backward(engine(batch / 100).square().mean())
            engine.step()
        return seen

    one = build()
    train(one, 3)
    one.save_checkpoint(folder / "saved")
    rest = train(one, 3)
    again = build()
    again.load_checkpoint(folder / "saved")
    assert train(again, 3) == rest
    assert torch.equal(one.module.weight, again.module.weight)
    assert [shape[1] for shape, _ in rest] == [8, 8, 8, 8, 12, 12]
    told = []
    one.set_data_post_process_func(lambda batch, state: (told.append(state["current_difficulties"]), batch[:, :1])[1])
    assert next(one.training_dataloader).shape[1] == 1
    assert told == [{"seqlen": 12}]
