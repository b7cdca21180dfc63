"""Folders that somebody else filled: what lies in wait there harms neither a save nor a load nor other files."""

import json
import os
import time
import zlib

import pytest

from deepspeed.checkpoint.storage import manifest as manifests
from deepspeed.checkpoint.storage.block_writer import FileFacts
from deepspeed.checkpoint.storage.durable import write_text
from deepspeed.checkpoint.storage.locate import find_loadable, read_latest, scan
from deepspeed.checkpoint.storage.manager import CheckpointManager, SavePolicy, SaveRequest
from deepspeed.checkpoint.storage.manifest import Manifest
from deepspeed.checkpoint.storage.rank_meeting import SingleRank
from deepspeed.errors import CheckpointError


def manager(**policy):
    return CheckpointManager(SingleRank(), SavePolicy(**policy))


def save(folder, tag, text="1", **policy):
    return manager(**policy).save(SaveRequest(folder, tag, {"x": text}, scripts={"zero_to_fp32.py": "# script"}))


def forge(folder, change):
    """A manifest with a true checksum over whatever `change` made of it."""
    folder.mkdir(exist_ok=True, parents=True)
    body = json.loads(Manifest(folder.name, "test", 1, {}).text())["manifest"]
    body = change(body) or body
    line = json.dumps(body, sort_keys=True)
    whole = {"checksum": f"{zlib.crc32(line.encode()):08x}", "manifest": body}
    (folder / "manifest.json").write_text(json.dumps(whole, sort_keys=True, indent=1) + "\n")


@pytest.fixture
def treasure(tmp_path):
    """Files of the user, outside the folder of checkpoints."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "keys").write_text("secret")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["keys"]
    assert (folder / "keys").read_text() == "secret"


PLANTED = (".latest.part", ".zero_to_fp32.py.part", ".a.part", "latest", "zero_to_fp32.py")


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe"])
def test_a_save_follows_no_planted_link(tmp_path, treasure, name, kind):
    folder = tmp_path / "out"
    folder.mkdir()
    if kind == "link":
        (folder / name).symlink_to(treasure / "keys")
    elif kind == "dangling":
        (folder / name).symlink_to(treasure / "new")
    elif kind == "hard link":
        os.link(treasure / "keys", folder / name)
    else:
        os.mkfifo(folder / name)
    save(folder, "a")
    assert read_latest(folder) == "a"
    assert (folder / "zero_to_fp32.py").read_text() == "# script"


def test_names_of_files_under_way_cannot_be_foreseen(tmp_path, monkeypatch):
    seen = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: seen.append((str(path), flags)) or real(path, flags, *rest)
    )
    for _ in range(2):
        write_text(tmp_path / "latest", "x")
    parts = [(path, flags) for path, flags in seen if ".part" in path]
    assert len({path for path, _ in parts}) == 2
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in parts)


@pytest.mark.parametrize("tag", ["a", "deep/a"])
def test_a_tag_that_is_a_link(tmp_path, treasure, tag):
    folder = tmp_path / "out"
    (folder / tag).parent.mkdir(parents=True)
    (folder / tag).symlink_to(treasure)
    save(folder, tag)
    assert not (folder / tag).is_symlink()
    assert sorted(path.name for path in (folder / tag).iterdir()) == ["manifest.json", "x"]
    assert list(folder.rglob(".*")) == []


def test_a_tag_below_a_link(tmp_path, treasure):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deep").symlink_to(treasure)
    with pytest.raises(CheckpointError, match="is a link, which leads out of it"):
        save(tmp_path / "out", "deep/a")


BAD_MANIFESTS = {
    "block 0": lambda body: body["files"].update(x={"size": 1, "block": 0, "columns": ""}),
    "block below 0": lambda body: body["files"].update(x={"size": 1, "block": -1, "columns": "00000000"}),
    "huge block": lambda body: body["files"].update(x={"size": 1, "block": 2**50, "columns": "00000000"}),
    "text size": lambda body: body["files"].update(x={"size": "1", "block": 4, "columns": "00000000"}),
    "infinite size": lambda body: body["files"].update(x={"size": float("inf"), "block": 4, "columns": ""}),
    "no sums": lambda body: body["files"].update(x={"size": 1, "block": 4}),
    "list of sums": lambda body: body["files"].update(x={"size": 4, "block": 4, "columns": [1]}),
    "text time": lambda body: body.update(saved_at="now"),
    "infinite time": lambda body: body.update(saved_at=float("inf")),
    "no time": lambda body: body.update(saved_at=float("nan")),
    "infinite version": lambda body: body.update(version=float("inf")),
    "list": lambda body: [body],
    "number": lambda body: 5,
    "files as list": lambda body: body.update(files=["x"]),
    "facts as list": lambda body: body.update(facts=[]),
    "absolute": lambda body: body["files"].update({"/etc/passwd": {"size": 0, "block": 4, "columns": ""}}),
    "upwards": lambda body: body["files"].update({"../x": {"size": 0, "block": 4, "columns": ""}}),
    "empty name": lambda body: body["files"].update({"": {"size": 0, "block": 4, "columns": ""}}),
    "dot": lambda body: body["files"].update({".": {"size": 0, "block": 4, "columns": ""}}),
    "NUL": lambda body: body["files"].update({"a\0": {"size": 0, "block": 4, "columns": ""}}),
    "detour": lambda body: body["files"].update({"a//b": {"size": 0, "block": 4, "columns": ""}}),
    "itself": lambda body: body["files"].update({"manifest.json": {"size": 0, "block": 4, "columns": ""}}),
}


def look_and_save(folder):
    """Everything that looks at siblings."""
    save(folder, "good", keep_last=1)
    assert manager().locate(folder).tag == "good"
    save(folder, "good", keep_last=1)
    scan(folder)


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_one_bad_sibling(tmp_path, name):
    forge(tmp_path / "bad", BAD_MANIFESTS[name])
    look_and_save(tmp_path)
    assert (tmp_path / "bad").is_dir()
    assert manifests.verify(tmp_path / "bad") != []
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        manifests.read(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="damaged"):
        manager().locate(tmp_path, "bad")
    save(tmp_path, "bad")  # takes its place
    assert manager().locate(tmp_path, "bad").tag == "bad"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "{}", "", "\xff", "1" * 5000, '{"manifest": null}'])
def test_a_sibling_of_any_text(tmp_path, text):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text(text, "latin-1")
    look_and_save(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "zero", "large", "folder"])
@pytest.mark.parametrize("name", ["bad/manifest.json", "bad/x.pt", "latest", "latest_universal"])
def test_no_file_at_all(tmp_path, kind, name):
    (tmp_path / "bad").mkdir()
    place = tmp_path / name
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "zero":
        place.symlink_to("/dev/zero")
    elif kind == "large":
        place.touch()
        os.truncate(place, 2**40)
    else:
        place.mkdir()
    if kind == "folder" and name == "latest":
        with pytest.raises(CheckpointError, match="latest"):
            save(tmp_path, "good")
        return
    save(tmp_path, "good", keep_last=1)
    assert manager().locate(tmp_path, "good").tag == "good"
    scan(tmp_path)


HIDDEN = (
    "...saving-x",
    "....replaced-x",
    ".latest.replaced-x",
    ".latest_universal.replaced-x",
    ".a/b.saving-x",
    ".\n.saving-x",
    ".good.replaced-x",
    ".good.removing-x",
    ".\udcff.saving-x",
)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("filled", [False, True])
def test_hidden_names_block_nothing(tmp_path, name, filled):
    (tmp_path / name).mkdir(parents=True)
    if filled:
        (tmp_path / name / "photo").write_text("x")
    look_and_save(tmp_path)
    assert (tmp_path / "latest").is_file()


def test_hidden_links_are_left_alone(tmp_path, treasure):
    folder = tmp_path / "out"
    folder.mkdir()
    for kind in ("saving", "replaced", "removing"):
        (folder / f".b.{kind}-x").symlink_to(treasure)
    look_and_save(folder)


def old(folder, tag, age):
    path = save(folder, tag)
    found = manifests.read(path)
    manifests.write(path, Manifest(tag, "test", 1, found.files, saved_at=time.time() - age))
    return path


def test_only_what_a_manifest_lists_goes(tmp_path):
    expired = old(tmp_path, "expired", 500)
    (expired / "notes").mkdir()
    (expired / "notes" / "mine.txt").write_text("mine")
    forge(tmp_path / "photos", lambda body: body.update(saved_at=1.0, tag="photos"))
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    whole = old(tmp_path, "whole", 400)
    save(tmp_path, "new", keep_last=1)
    assert not whole.exists()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "expired/notes/mine.txt", "latest", "new/manifest.json", "new/x", "photos/cat.jpg", "zero_to_fp32.py",
    ]  # fmt: skip


def test_nothing_is_deleted_through_a_link(tmp_path, treasure):
    folder = tmp_path / "out"
    facts = FileFacts(6, (0,))
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "sub").symlink_to(treasure)
    manifests.write(folder / "old", Manifest("old", "test", 1, {"sub/keys": facts, "x": facts}, saved_at=1.0))
    (folder / "link").symlink_to(treasure)
    save(folder, "new", keep_last=1)
    assert (folder / "link").is_symlink()


def test_a_tag_that_is_a_link_is_left_in_order(tmp_path):
    elsewhere = old(tmp_path / "elsewhere", "a", 1000)
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").symlink_to(elsewhere)
    for tag in ("b", "c"):
        save(out, tag, keep_last=1)
    assert (elsewhere / "x").read_text() == "1"
    assert (out / "a").is_symlink()
    assert manager().locate(out, "a").tag == "a"


def test_times_from_the_future_displace_nothing(tmp_path):
    ahead = old(tmp_path, "ahead", -1e6)
    first = old(tmp_path, "first", 100)
    save(tmp_path, "second", keep_last=2)
    assert first.exists()
    assert ahead.exists()
    (tmp_path / "latest").write_text("gone")
    assert find_loadable(tmp_path).tag == "second"
    save(tmp_path, "third", keep_last=2)
    assert not first.exists()


def test_tags_with_a_slash_count(tmp_path):
    for step in range(4):
        save(tmp_path, f"epoch{step}/step", keep_last=2)
    other = save(tmp_path / "critic", "old")  # another run, in a folder within
    os.utime(other)
    assert [checkpoint.tag for checkpoint in scan(tmp_path)] == ["epoch3/step", "epoch2/step"]
    save(tmp_path, "flat", keep_last=1)
    assert [checkpoint.tag for checkpoint in scan(tmp_path)] == ["flat"]
    assert other.is_dir()
    (tmp_path / "latest").unlink()
    assert manager().locate(tmp_path / "critic").tag == "old"


@pytest.mark.parametrize("text", ["/etc", "..", "../out", "a/../../x", "a\0b", "", ".", "x" * 5000, "\x1b[2J"])
def test_latest_cannot_lead_outside(tmp_path, text):
    save(tmp_path / "outside", "x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "latest").write_text(text.replace("/etc", str(tmp_path / "outside" / "x")))
    for tag in (None, text):
        with pytest.raises(CheckpointError) as told:
            manager().locate(tmp_path / "out", tag)
        assert str(told.value).replace("\n", "").isprintable()


def test_what_others_put_into_a_tag_survives_its_replacement(tmp_path):
    path = save(tmp_path, "a")
    for name in (".mine", "notes/.deep", "x.txt"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")
    (path / "link").symlink_to("/")
    save(tmp_path, "a", "2")
    assert (path / "x").read_text() == "2"
    assert sorted(p.name for p in path.rglob("*") if not p.is_dir() or p.is_symlink()) == [
        ".deep", ".mine", "link", "manifest.json", "x", "x.txt"
    ]  # fmt: skip
