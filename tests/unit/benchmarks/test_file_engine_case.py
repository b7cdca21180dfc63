"""The case of the file engine: the ratio is ours by the better of fio's engines, and a missing fio is told."""

from __future__ import annotations

import pytest

from benchmarks.case import Job
from benchmarks.cases import discover, file_engine

FIO = """#!/bin/sh
case "$*" in
    *io_uring*) speed=2000000000 ;;
    *) speed=1000000000 ;;
esac
echo "$*" >> asked
echo "{\\"jobs\\": [{\\"read\\": {\\"bw_bytes\\": $speed}, \\"write\\": {\\"bw_bytes\\": $speed}}]}"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(file_engine, "SIZE", 2**20)
    monkeypatch.setattr(file_engine, "REPEATS", 3)
    monkeypatch.chdir(tmp_path)
    return Job("ours", "", 0, 1, {"block": 4096, "depth": 4}, str(tmp_path))


def test_ours_and_fio_take_turns_with_the_same_numbers(job, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fio").write_text(FIO)
    (tmp_path / "bin" / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    got = file_engine.measure(job)
    assert set(got) == {measure.name for measure in discover()["file_engine"].measures}
    for way in ("read", "write"):
        assert got[f"fio_{way}_speed"] == 2.0
        assert got[way] == pytest.approx(got[f"{way}_speed"] / 2)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 * 2 * 2
    for words in ("--bs=4096", "--iodepth=4", "--direct=1", "--size=1048576"):
        assert all(words in line for line in asked)


def test_a_missing_fio_is_told(job, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="package fio"):
        file_engine.measure(job)
