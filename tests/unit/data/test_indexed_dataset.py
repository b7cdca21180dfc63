"""Indexed datasets byte for byte; broken and hostile indexes."""

from __future__ import annotations

import json
import pickle
import struct

import numpy as np
import pytest

from deepspeed.data import indexed_dataset as indexed
from deepspeed.data.__main__ import main
from deepspeed.errors import FileError, UsageError
from tests.unit.data.oracle import FIXTURE, build, datasets


def test_files_are_those_of_deepspeed_byte_for_byte(tmp_path):
    found = datasets(indexed.MMapIndexedDatasetBuilder, tmp_path)
    assert found == json.loads(FIXTURE.read_text())["datasets"]


def test_items_come_back(tmp_path):
    path = str(tmp_path / "x")
    assert not indexed.MMapIndexedDataset.exists(path)
    build(indexed.MMapIndexedDatasetBuilder, tmp_path / "x", "int32")
    assert indexed.MMapIndexedDataset.exists(path)
    chance = np.random.default_rng(0)
    expected = [chance.integers(0, 100, chance.integers(0, 9)).tolist() for _ in range(10)]
    for dataset in (indexed.MMapIndexedDataset(path), pickle.loads(pickle.dumps(indexed.MMapIndexedDataset(path)))):
        assert [each.tolist() for each in dataset[:]] == expected
        assert [dataset.size(number) for number in range(len(dataset))] == list(map(len, expected))
        assert dataset.doc_idx.tolist() == [0, 3, 6, 9]
    longest = max(range(10), key=lambda number: len(expected[number]))
    assert dataset.get(longest, 1, 3).tolist() == expected[longest][1:4]
    with pytest.raises(IndexError, match=r"asked for 3 from 7"):
        dataset.get(longest, 7, 3)


def test_what_is_no_dataset(tmp_path):
    with pytest.raises(FileError, match="an indexed dataset is two files"):
        indexed.MMapIndexedDataset(str(tmp_path / "w"))
    with pytest.raises(UsageError, match="float64"):
        indexed.MMapIndexedDatasetBuilder(str(tmp_path / "f"), dtype=np.float64)
    narrow = indexed.MMapIndexedDatasetBuilder(str(tmp_path / "f"), dtype=np.uint16)
    narrow.add_item(np.array([65535]))
    with pytest.raises(UsageError, match="item 1 has numbers from 7 to 65536, which uint16 cannot hold"):
        narrow.add_item(np.array([7, 65536]))


def test_megatron_has_another_code_for_uint16(tmp_path):
    for dtype in ("uint16", "uint64"):
        build(indexed.MMapIndexedDatasetBuilder, tmp_path / dtype, dtype)
        index = bytearray((tmp_path / f"{dtype}.idx").read_bytes())
        index[17] = 8
        expected = [each.tolist() for each in indexed.MMapIndexedDataset(str(tmp_path / dtype))[:]]
        (tmp_path / f"{dtype}.idx").write_bytes(index)
        found = indexed.MMapIndexedDataset(str(tmp_path / dtype))
        assert (found.dtype, [each.tolist() for each in found[:]]) == (getattr(np, dtype), expected)


HUGE = 2**62


@pytest.mark.parametrize(
    ("place", "layout", "value", "said"),
    [
        (0, "9s", b"MMIDIDY\0\0", "begins with"),
        (9, "<Q", 2, "version 2 and dtype code 5"),
        (17, "<B", 99, "dtype code 99"),
        (18, "<Q", HUGE, f"{HUGE} items"),
        (26, "<Q", HUGE, f"{HUGE} boundaries"),
        (34, "<i", -5, "item 0 has -5 elements"),
        (34, "<i", 2**31 - 1, "item 0 has 2147483647 elements"),
        (34 + 40, "<q", HUGE, f"from byte {HUGE} on"),
        (34 + 40, "<q", -8, "from byte -8 on"),
    ],
)
def test_a_broken_index_is_named_and_harmless(tmp_path, place, layout, value, said):
    build(indexed.MMapIndexedDatasetBuilder, tmp_path / "x", "int64")
    data = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into(layout, data, place, value)
    (tmp_path / "x.idx").write_bytes(data)
    with pytest.raises(FileError, match=said) as caught:
        indexed.MMapIndexedDataset(str(tmp_path / "x"))[0]
    assert caught.value.filename == str(tmp_path / "x.idx")


def test_cut_files_and_files_of_another_dataset(tmp_path, capsys):
    build(indexed.MMapIndexedDatasetBuilder, tmp_path / "x", "int64")
    index = (tmp_path / "x.idx").read_bytes()
    for size in (0, 5, 30, len(index) - 1):
        (tmp_path / "x.idx").write_bytes(index[:size])
        with pytest.raises(FileError, match="broken index"):
            indexed.MMapIndexedDataset(str(tmp_path / "x"))
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:20])
    with pytest.raises(FileError, match="item 0"):
        indexed.MMapIndexedDataset(str(tmp_path / "x"))[0]
    assert main(["inspect", str(tmp_path / "x")]) == 1
    assert "broken index" in capsys.readouterr().err
