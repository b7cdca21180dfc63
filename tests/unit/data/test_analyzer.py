"""Metrics of a dataset: the files of DeepSpeed's analyzer; hooks, wrong metrics, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from deepspeed.data.__main__ import main
from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from deepspeed.errors import FileError, UsageError
from tests.unit.data.oracle import FIXTURE, Lengths, analyse, contents

METRIC = {
    "metric_names": ["seqlen"],
    "metric_functions": [lambda data: data[:, 0]],
    "metric_types": ["single_value_per_sample"],
}


def test_the_files_are_those_of_deepspeed(tmp_path):
    analyse(DataAnalyzer, tmp_path)
    assert contents(MMapIndexedDataset, tmp_path) == json.loads(FIXTURE.read_text())["metrics"]


def test_samples_may_name_themselves(tmp_path):
    def collate(items):
        return {"index": torch.tensor([[int(each[0])] for each in items]), "x": torch.stack(items)[:, 0]}

    options = {**METRIC, "metric_functions": [lambda data: 300 - data["x"]]}
    DataAnalyzer(Lengths(), batch_size=9, save_path=str(tmp_path), collate_fn=collate, **options).run_map_reduce()
    samples = MMapIndexedDataset(str(tmp_path / "seqlen" / "seqlen_index_to_sample"))
    values = MMapIndexedDataset(str(tmp_path / "seqlen" / "seqlen_index_to_metric"))
    assert all(set(samples[number].tolist()) == {300 - values[number][0]} for number in range(len(values)))
    DataAnalyzer(Lengths(), save_path=str(tmp_path), sample_indices=range(1000, 1500), **METRIC).run_map_reduce()
    assert int(MMapIndexedDataset(str(tmp_path / "seqlen" / "seqlen_index_to_sample"))[0][0]) == 1000


def test_hooks_take_the_place_of_each_part(tmp_path):
    seen = []
    DataAnalyzer(
        Lengths(),
        batch_size=250,
        custom_map_init=lambda *arguments: seen.append(("init", *arguments)) or [],
        custom_map_update=lambda *arguments: seen.append(("update", len(arguments[0]), arguments[-1])),
        custom_map_finalize=lambda *arguments: seen.append(("finalize",)),
        custom_reduce=lambda *arguments: seen.append(("reduce", *arguments[3:])),
        save_path=str(tmp_path),
    ).run_map_reduce()
    assert seen == [
        ("init", 0, [], [], [], str(tmp_path), 0),
        ("update", 250, 0),
        ("update", 250, 250),
        ("finalize",),
        ("reduce", str(tmp_path), 1, 1, 1),
    ]


def test_wrong_metrics_are_named(tmp_path, capfd):
    with pytest.raises(FileError, match="worker 1, thread 0 has no readable map results"):
        one = DataAnalyzer(Lengths(), num_workers=2, batch_size=99, save_path=str(tmp_path), **METRIC)
        one.run_map()
        one.run_reduce()
    with pytest.raises(UsageError, match="metric_types: seqlen has 'x'"):
        DataAnalyzer([], **{**METRIC, "metric_types": ["x"]})
    floats = {**METRIC, "metric_functions": [lambda data: data[:, 0].float()]}
    with pytest.raises(UsageError, match=r"metric seqlen gave torch.float32; expected a tensor of integers"):
        DataAnalyzer(Lengths(), save_path=str(tmp_path), **floats).run_map()
    few = {**METRIC, "metric_functions": [lambda data: data[:1, 0]]}
    with pytest.raises(UsageError, match="metric seqlen gave 50 numbers for 500 samples; expected one for each"):
        DataAnalyzer(Lengths(), batch_size=10, save_path=str(tmp_path), **few).run_map()
    with pytest.raises(UsageError, match=r"threads \[0, 1\] of worker 0 failed"):
        DataAnalyzer(Lengths(), num_threads=2, save_path=str(tmp_path), **floats).run_map()
    assert "expected a tensor of integers" in capfd.readouterr().err


def test_the_command(tmp_path, capsys):
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    for item in ([7] * 9, [7, 8], [9, 9, 9]):
        builder.add_item(item)
    builder.finalize(str(tmp_path / "x.idx"))
    path = str(tmp_path / "x")
    assert main(["analyze", path, str(tmp_path), "--metric", "seqlen", "vocabularyrarity"]) == 0
    assert MMapIndexedDataset(str(tmp_path / "seqlen" / "seqlen_sample_to_metric"))[:] == [[9], [2], [3]]
    rarity = [
        int(each[0])
        for each in MMapIndexedDataset(str(tmp_path / "vocabularyrarity/vocabularyrarity_sample_to_metric"))
    ]
    assert rarity == [int(9 * np.log(14 / 10)), int(np.log(14 / 10) + np.log(14)), int(3 * np.log(14 / 3))]
    capsys.readouterr()
    assert main(["inspect", path]) == 0
    assert "items: 3" in capsys.readouterr().out
