"""Directories come into being whole, take the place of others in one step, and leave the same way."""

import os
import re

import pytest

from deepspeed.checkpoint.storage import commit
from deepspeed.checkpoint.storage import manifest as manifests
from deepspeed.checkpoint.storage.commit import Staging, leftovers, recover, remove
from deepspeed.checkpoint.storage.durable import write_file
from deepspeed.checkpoint.storage.locate import find_loadable
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.errors import CheckpointError


def stage(folder, tag, data, token="t1"):
    staging = Staging(folder, tag, token)
    staging.open()
    facts = write_file(staging.path / "data", lambda stream: stream.write(data))
    staging.seal(Manifest(tag, "test", 1, {"data": facts}))
    return staging


def content(folder, tag):
    return (folder / tag / "data").read_bytes()


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture(params=["exchange", "two renames"])
def how(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)


def test_nothing_shows_before_it_is_published(tmp_path):
    staging = stage(tmp_path / "runs", "a", b"1")
    assert find_loadable(tmp_path / "runs").tag is None
    staging.publish(scripts={"tool.py": "pass\n"})
    assert names(tmp_path / "runs") == ["a", "latest", "tool.py"]
    assert (tmp_path / "runs" / "latest").read_text() == "a"
    assert find_loadable(tmp_path / "runs").tag == "a"


def test_the_same_tag_again(tmp_path, how):
    stage(tmp_path, "a", b"1").publish()
    stage(tmp_path, "a", b"2").publish()
    assert content(tmp_path, "a") == b"2"
    assert names(tmp_path) == ["a", "latest"]


def test_a_tag_with_a_slash(tmp_path, how):
    for data in (b"1", b"2"):
        stage(tmp_path, "run/a", data).publish()
    found = find_loadable(tmp_path)
    assert (found.tag, found.path) == ("run/a", tmp_path / "run/a")
    assert content(tmp_path, "run/a") == b"2"


def test_files_of_others_stay(tmp_path, how):
    stage(tmp_path, "a", b"1").publish()
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "more").mkdir()
    (tmp_path / "a" / "more" / "x").write_text("x")
    stage(tmp_path, "a", b"2").publish()
    assert names(tmp_path / "a") == ["data", "manifest.json", "more", "tokenizer.json"]
    assert (tmp_path / "a" / "more" / "x").read_text() == "x"


def test_files_of_an_older_deepspeed_are_replaced(tmp_path, how):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"old")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    stage(tmp_path, "a", b"2").publish()
    assert names(tmp_path / "a") == ["data", "manifest.json", "notes.txt"]


def test_a_failure_to_publish_puts_the_old_one_back(tmp_path, how, monkeypatch):
    stage(tmp_path, "a", b"1").publish()
    staging = stage(tmp_path, "a", b"2")

    def full(path, text, **options):
        raise CheckpointError(f"{path}: No space left on device")

    monkeypatch.setattr(commit, "write_text", full)
    with pytest.raises(CheckpointError, match="latest: No space left"):
        staging.publish()
    staging.discard()
    assert content(tmp_path, "a") == b"1"
    assert names(tmp_path) == ["a", "latest"]
    fresh = stage(tmp_path, "b", b"3")
    with pytest.raises(CheckpointError):
        fresh.publish()
    fresh.discard()
    assert names(tmp_path) == ["a", "latest"]


def test_if_the_second_of_two_renames_fails_the_first_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    stage(tmp_path, "a", b"1").publish()
    staging = stage(tmp_path, "a", b"2")
    original = os.rename

    def fail(source, target):
        if source == staging.path:
            raise OSError(5, "Input/output error")
        original(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        staging.publish()
    assert content(tmp_path, "a") == b"1"


def test_each_step_is_durable_before_the_next(tmp_path, monkeypatch):
    stage(tmp_path, "a", b"1").publish()
    acts = []
    place = lambda fd: os.readlink(f"/proc/self/fd/{fd}").replace(str(tmp_path), "").lstrip("/")  # noqa: E731
    fsync, rename, exchange = os.fsync, os.rename, commit._exchange
    monkeypatch.setattr(os, "fsync", lambda fd: (acts.append(f"sync {place(fd)}"), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (acts.append(f"name {b.relative_to(tmp_path)}"), rename(a, b)))
    monkeypatch.setattr(commit, "_exchange", lambda a, b: acts.append("swap") or exchange(a, b))
    stage(tmp_path, "a", b"2").publish()
    staging = ".a.saving-t1"
    assert [re.sub("part-[0-9a-f]{16}$", "part", act).rstrip() for act in acts] == [
        f"sync {staging}/.data.part",
        f"name {staging}/data",
        f"sync {staging}",
        f"sync {staging}/.manifest.json.part",
        f"name {staging}/manifest.json",
        f"sync {staging}",
        "swap",
        "sync",
        "sync .latest.part",
        "name latest",
        "sync",
    ]


def test_what_a_rank_wrote_has_to_be_seen_by_the_leader(tmp_path):
    staging = Staging(tmp_path, "a", "t1")
    staging.open()
    facts = write_file(staging.path / "data", lambda stream: stream.write(b"1"))
    (staging.path / "data").unlink()
    with pytest.raises(CheckpointError, match=r"missing.*use_node_local_storage"):
        staging.seal(Manifest("a", "test", 1, {"data": facts}))


def test_what_a_crash_leaves_is_removed_by_the_next_save(tmp_path):
    stage(tmp_path, "a", b"1").publish()
    crashed = stage(tmp_path, "b", b"2", token="dead")
    crashed._unlock()  # as the end of the process does
    (tmp_path / ".c.removing-x").mkdir()
    assert sorted(left.tag for left in leftovers(tmp_path)) == ["b", "c"]
    problems = find_loadable(tmp_path).problems
    assert any("interrupted save of tag b" in str(problem) for problem in problems)
    stage(tmp_path, "d", b"4").publish()
    assert names(tmp_path) == ["a", "d", "latest"]


def test_a_running_save_is_left_alone(tmp_path):
    running = stage(tmp_path, "a", b"1", token="other")
    assert [left.active for left in leftovers(tmp_path)] == [True]
    assert recover(tmp_path) == []
    stage(tmp_path, "b", b"2").publish()
    running.publish(latest=None)
    assert names(tmp_path) == ["a", "b", "latest"]


def test_between_two_renames_the_old_one_is_found_and_put_back(tmp_path):
    stage(tmp_path, "a", b"1").publish()
    os.rename(tmp_path / "a", tmp_path / ".a.replaced-dead")
    found = find_loadable(tmp_path)
    assert (found.tag, found.path) == ("a", tmp_path / ".a.replaced-dead")
    assert any("put back" in line for line in recover(tmp_path))
    assert content(tmp_path, "a") == b"1"


def test_removal(tmp_path):
    stage(tmp_path, "a", b"1").publish()
    manifest = manifests.read(tmp_path / "a")
    remove(tmp_path / "a", manifest, "t")
    assert names(tmp_path) == ["latest"]
    with pytest.raises(CheckpointError, match="No such file"):
        remove(tmp_path / "a", manifest, "t")
