"""The manifest: no byte of a checkpoint changes unnoticed."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.block_reader import FileCheck
from deepspeed.checkpoint.storage.block_writer import KINDS, FileFacts
from deepspeed.checkpoint.storage.durable import write_tensorfile, write_text
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    files = {
        "model.pt": write_tensorfile(tmp_path / "model.pt", {"a": torch.arange(900.0)}),
        "notes.txt": write_text(tmp_path / "notes.txt", "some text"),
        "empty": write_text(tmp_path / "empty", ""),
    }
    manifest.write(tmp_path, Manifest("step1", "deepspeed", 2, files, {"stage": 2}))
    return tmp_path


def test_what_is_written_is_read(checkpoint):
    found = manifest.read(checkpoint)
    assert (found.tag, found.format, found.world_size, found.facts) == ("step1", "deepspeed", 2, {"stage": 2})
    assert found.written_by.startswith("deepspeed ")
    assert found.bytes == sum(entry.stat().st_size for entry in checkpoint.iterdir() if entry.name != manifest.NAME)
    assert manifest.check(checkpoint) == []
    assert manifest.verify(checkpoint) == []
    assert manifest.verify(checkpoint, ["notes.txt"]) == []


def test_no_manifest(tmp_path):
    assert manifest.read(tmp_path) is None
    assert "no manifest" in str(manifest.check(tmp_path)[0])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_any_file_is_found_and_named(checkpoint, data):
    path = checkpoint / data.draw(st.sampled_from(["model.pt", "notes.txt", manifest.NAME]))
    before = path.read_bytes()
    start = data.draw(st.integers(0, len(before) - 1))
    stop = data.draw(st.integers(start + 1, min(len(before), start + 40)))
    how = data.draw(st.sampled_from(["flip", "cut out", "truncate", "zero", "append"]))
    if how == "flip":
        after = before[:start] + bytes(byte ^ 0xFF for byte in before[start:stop]) + before[stop:]
    elif how == "zero":
        after = before[:start] + bytes(stop - start) + before[stop:]
    else:
        after = {"cut out": before[:start] + before[stop:], "truncate": before[:start], "append": before + b"x"}[how]
    path.write_bytes(after)
    try:
        problems = manifest.verify(checkpoint)
        if after != before:
            assert [problem.file for problem in problems] == [str(path)]
            assert str(path) in str(problems[0])
        if len(after) != len(before):
            assert manifest.check(checkpoint)
    finally:
        path.write_bytes(before)


def test_missing_and_unknown_files(checkpoint):
    (checkpoint / "notes.txt").unlink()
    assert [str(problem) for problem in manifest.check(checkpoint)] == [
        f"{checkpoint / 'notes.txt'}: missing; the manifest lists it with 9 bytes"
    ]
    assert "not in the manifest" in str(manifest.verify(checkpoint, ["other.pt"])[0])


def test_damaged_blocks_are_told_as_ranges(tmp_path):
    data = bytes(range(256)) * 40  # 10240 bytes in 10 blocks of 1024
    facts = FileFacts(len(data), tuple(manifest.zlib.crc32(data[i : i + 1024]) for i in range(0, 10240, 1024)), 1024)
    bad = bytearray(data)
    for place in (1024, 2100, 9 * 1024):
        bad[place] ^= 1
    (tmp_path / "x").write_bytes(bad)
    told = [problem.what.partition(" of")[0] for problem in FileCheck(tmp_path / "x", facts).problems(0, 10240)]
    assert told == ["damaged between bytes 1024 and 3072", "damaged between bytes 9216 and 10240"]
    check = FileCheck(tmp_path / "x", facts)
    check.require(3072, 9216)
    assert check.checked == set(range(3, 9))
    with pytest.raises(CheckpointError, match="1024 and 2048"):
        check.require(1100, 1101)
    check.require(5, 5)


def test_files_of_several_ranks():
    parts = [{"a.pt": FileFacts(3, (7,))}, {"b.pt": FileFacts(0, ())}]
    travelled = json.loads(json.dumps([manifest.entries(part) for part in parts]))
    assert manifest.merge(travelled) == {"a.pt": FileFacts(3, (7,)), "b.pt": FileFacts(0, ())}


def test_a_manifest_of_the_future(checkpoint):
    path = checkpoint / manifest.NAME
    content = json.loads(path.read_text())
    content["manifest"]["version"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"version 99.*Update"):
        manifest.read(checkpoint)


def test_a_manifest_of_the_first_version(tmp_path):
    """It knew CRC-32 alone; such checkpoints stay readable, and are compared."""
    data = bytes(range(256)) * 40
    (tmp_path / "x").write_bytes(data)
    sums = tuple(KINDS["crc32"](data[i : i + 4096], 0) for i in range(0, len(data), 4096))
    old = Manifest("tag", "deepspeed", 1, {"x": FileFacts(len(data), sums, 4096, "crc32")})
    manifest.write(tmp_path, old)
    assert json.loads((tmp_path / manifest.NAME).read_text())["manifest"]["version"] == 1
    assert manifest.read(tmp_path) == old
    assert manifest.verify(tmp_path) == []
    (tmp_path / "x").write_bytes(data[:-1] + b"?")
    assert "damaged between bytes 8192 and 10240" in str(manifest.verify(tmp_path)[0])
