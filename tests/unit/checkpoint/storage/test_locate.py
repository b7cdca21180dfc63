"""Which checkpoint is loaded: a whole one, and reasons for every other."""

import os

import pytest
import torch

from deepspeed.checkpoint.storage.durable import write_tensorfile
from deepspeed.checkpoint.storage.locate import common, examine, find_loadable, scan
from deepspeed.checkpoint.storage.manifest import NAME, Manifest, write


def make(folder, tag, saved_at, latest=True):
    (folder / tag).mkdir(parents=True)
    facts = write_tensorfile(folder / tag / "model.pt", {"a": torch.arange(100)})
    write(folder / tag, Manifest(tag, "test", 1, {"model.pt": facts}, {"save": f"s{saved_at}"}, saved_at=saved_at))
    if latest:
        (folder / "latest").write_text(f"{tag}\n")
    return folder / tag / "model.pt"


def cut(path, size=100):
    os.truncate(path, size)


def test_latest(tmp_path):
    make(tmp_path, "b", 2.0)
    make(tmp_path, "a", 1.0)
    found = find_loadable(tmp_path)
    assert (found.tag, found.problems) == ("a", ())
    assert [other.tag for other in found.others] == ["b"]
    assert found.checkpoint.manifest.tag == "a"
    assert found.checkpoint.save == "s1.0"


def test_a_damaged_one_is_skipped_for_the_newest_good_one(tmp_path):
    make(tmp_path, "old", 1.0)
    make(tmp_path, "good", 2.0)
    cut(make(tmp_path, "bad", 3.0))
    found = find_loadable(tmp_path)
    assert found.tag == "good"
    assert f"{tmp_path}/bad/model.pt: truncated: 100 bytes" in str(found.problems[0])


def test_a_damaged_one_that_is_asked_for_is_not_replaced(tmp_path):
    make(tmp_path, "good", 2.0)
    cut(make(tmp_path, "bad", 3.0))
    found = find_loadable(tmp_path, "bad")
    assert found.tag is None
    assert "truncated" in found.explained()
    assert "newest whole checkpoint here is 'good'" in found.explained()
    missing = find_loadable(tmp_path, "nonsense")
    assert "nonsense: no such checkpoint" in missing.explained()


@pytest.mark.parametrize("text", ["gone", "", "../..", "\xff"])
def test_a_wrong_latest(tmp_path, text):
    make(tmp_path, "good", 2.0)
    (tmp_path / "latest").write_bytes(text.encode("latin-1"))
    found = find_loadable(tmp_path)
    assert found.tag == "good"
    assert "of which there is no checkpoint" in str(found.problems[0])


def test_no_latest(tmp_path):
    make(tmp_path, "good", 2.0, latest=False)
    found = find_loadable(tmp_path)
    assert found.tag is None
    assert not found.named
    assert "'good'" in found.explained()
    assert find_loadable(tmp_path, "good").tag == "good"
    assert find_loadable(tmp_path / "nowhere").tag is None


def test_nothing_good(tmp_path):
    cut(make(tmp_path, "bad", 3.0))
    found = find_loadable(tmp_path)
    assert found.tag is None
    assert found.named
    assert "no other whole checkpoint" in found.explained()


def test_a_damaged_manifest(tmp_path):
    make(tmp_path, "good", 1.0)
    make(tmp_path, "bad", 2.0)
    cut(tmp_path / "bad" / NAME, 20)
    found = find_loadable(tmp_path)
    assert found.tag == "good"
    assert NAME in str(found.problems[0])


def test_checkpoints_without_a_manifest(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        torch.save({"a": torch.arange(1000)}, tmp_path / name / "mp_rank_00_model_states.pt")
    os.utime(tmp_path / "first", (1, 1))
    (tmp_path / "latest").write_text("second")
    assert find_loadable(tmp_path).tag == "second"
    assert find_loadable(tmp_path).checkpoint.manifest is None
    cut(tmp_path / "second" / "mp_rank_00_model_states.pt", 500)
    found = find_loadable(tmp_path)
    assert found.tag == "first"
    assert "mp_rank_00_model_states.pt: truncated" in str(found.problems[0])
    (tmp_path / "third").mkdir()
    assert not examine(tmp_path / "third", "third").good
    assert [checkpoint.tag for checkpoint in scan(tmp_path)][-1] == "first"


def test_what_all_nodes_can_load():
    assert common([]) is None
    assert common([[]]) is None
    assert common([[("a", "1"), ("b", "2")]]) == 0
    assert common([[("a", "2"), ("b", "1")], [("a", "1"), ("b", "1")]]) == 1
    assert common([[("a", "2")], [("a", "1")]]) is None
