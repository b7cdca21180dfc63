"""The tools refuse what they cannot do, and whatever they are asked to do, what they read stays as it is.

`DEEPSPEED_TEST_INVOCATIONS=10000` runs as many random command lines; the suite a few.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint import __main__ as program
from deepspeed.checkpoint import ds_to_universal, zero_to_fp32
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.checkpoint.storage import manifest
from deepspeed.checkpoint.storage.locate import find_loadable
from deepspeed.errors import DeepSpeedError
from tests.checkpoint_states import SMALL

INVOCATIONS = int(os.environ.get("DEEPSPEED_TEST_INVOCATIONS", "60"))


def hashed(folder: Path) -> dict[str, str]:
    """Everything below a folder: files by content, links by what they name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder of tags with `latest`, links to it, and the folder to call tools from."""
    SMALL.save(tmp_path / "runs" / "tag", 2, 2)
    (tmp_path / "runs" / "latest").write_text("tag")
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "taglink").symlink_to("runs/tag")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(*arguments: str) -> int:
    return program.main(["convert", *arguments])


ONTO_ITSELF = ["runs", "runs/tag", "link", "link/tag", "taglink", "runs/tag/inside", "taglink/inside", "./runs/../runs"]
ONTO_ITSELF += ["runs/../runs/tag", ".", "..", "runs/new", "link/new/deeper"]


@pytest.mark.parametrize("to", ["fp32", "universal", "deepspeed", "native"])
@pytest.mark.parametrize("source", ["runs", "link"])
def test_onto_its_own_source(runs, capsys, to, source):
    before = hashed(runs)
    for output in [*ONTO_ITSELF, str(runs / "runs"), str(runs / "runs" / "tag")]:
        assert convert(source, output, "--to", to) == 1, output
        assert "which is read, or lies inside or around it" in capsys.readouterr().err.replace("\n", " ")
        assert hashed(runs) == before


@pytest.mark.parametrize("to", ["fp32", "universal", "deepspeed", "native"])
def test_into_what_is_there(runs, capsys, to):
    (runs / "file").write_text("x")
    for output in ("full", "file", ""):
        before = hashed(runs)
        assert convert("runs", output, "--to", to) == 1
        assert capsys.readouterr().err
        assert hashed(runs) == before
    (runs / "empty").mkdir()
    assert convert("runs", "empty", "--to", to) == 0
    assert convert("runs", "empty", "--to", to) == 1
    assert convert("taglink", "absent/deep", "--to", to) == 0


@pytest.mark.parametrize("to", ["deepspeed", "native", "universal"])
def test_what_is_written_is_a_checkpoint_with_all_that_belongs_to_it(runs, to):
    assert convert("runs", "new", "--to", to) == 0
    latest = "latest_universal" if to == "universal" else "latest"
    found = find_loadable(runs / "new", latest=latest)
    assert (found.tag, found.checkpoint.manifest.format) == ("tag", to)
    assert manifest.verify(runs / "new" / "tag") == []
    assert [path.name for path in (runs / "new").iterdir() if path.name.startswith(".")] == []
    SMALL.check(open_checkpoint(runs / "new" / "tag")) if to != "universal" else None
    assert (runs / "new" / "zero_to_fp32.py").exists() == (to == "deepspeed")


def test_weights_have_a_manifest(runs):
    assert convert("runs", "new") == 0
    assert manifest.verify(runs / "new") == []
    assert set(open_file(runs / "new" / "model.safetensors").tensors) >= {"a.weight"}


USELESS = {
    "no number of ranks": ["--to", "native", "--ranks", "0"],
    "expected one argument": ["--to", "native", "--ranks"],
    "1 to 65536": ["--to", "deepspeed", "--ranks", "99999999999"],
    "a size is a number": ["--max_shard_size", "abc"],
    "at least 1": ["--max_shard_size", "0"],
    "--ranks has no meaning with --to fp32": ["--ranks", "2"],
    "--stage has no meaning with --to bf16": ["--to", "bf16", "--stage", "2"],
    "--stage has no meaning with --to universal": ["--to", "universal", "--stage", "2"],
    "--torch has no meaning with --to native": ["--to", "native", "--torch"],
    "--max_shard_size has no meaning": ["--to", "deepspeed", "--max_shard_size", "1GB"],
    "--with-classes has no meaning": ["--to", "native", "--with-classes"],
}


@pytest.mark.parametrize("text", USELESS)
def test_options_that_mean_nothing(runs, capsys, text):
    before = hashed(runs)
    with pytest.raises(SystemExit) as ended:
        convert("runs", "new", *USELESS[text])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert hashed(runs) == before


def test_a_rank_count_below_zero(runs, capsys):
    with pytest.raises(SystemExit):
        convert("runs", "new", "--to", "native", "--ranks", "-1")
    assert not (runs / "new").exists()


def test_a_failure_leaves_nothing(runs, monkeypatch, capsys):
    before = hashed(runs)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    for to in ("deepspeed", "native", "universal"):
        assert convert("runs", "new/deep", "--to", to) == 1
        assert "No space left" in capsys.readouterr().err
        assert hashed(runs) == before


def test_ds_to_universal_refuses_too(runs):
    for output in ("runs/tag", "runs/tag/x", "taglink", "full", "."):
        before = hashed(runs)
        with pytest.raises(DeepSpeedError):
            ds_to_universal.main(
                ds_to_universal.parse_arguments(["--input_folder", "runs/tag", "--output_folder", output])
            )
        assert hashed(runs) == before
    arguments = ["--input_folder", "runs/tag", "--output_folder", "runs/tag_universal"]
    ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
    assert (runs / "runs" / "latest_universal").read_text() == "tag_universal"
    with pytest.raises(DeepSpeedError, match="something in it"):
        ds_to_universal.main(ds_to_universal.parse_arguments(arguments))


PATHS = ["runs", "runs/tag", "link", "taglink", "full", ".", "..", "", "/", "new", "new/deeper", "absent/x", "runs/new"]
PATHS += ["./runs/../runs", "file\x1b[2J", "a\0b", "~", "full/mine.txt", "runs/tag/manifest.json", "\udcff", "[red]"]
TAGS = ["tag", "absent", "..", "/", "", ".", "a\0", "../runs/tag", "tag/", "tag/../tag", "latest"]
VALUES = ["0", "-1", "1", "2", "3", "abc", "", "1GB", "1e9", "10KB", "\u0663", "99999999999999999999", "--", "nan"]


def command(chance: random.Random) -> tuple[str, list[str]]:
    """A tool and arguments that somebody might give it, tired or not."""

    def some(names: list[str]) -> list[str]:
        return [word for name in names if chance.random() < 0.3 for word in (name, chance.choice(VALUES))]

    paths = [chance.choice(PATHS), chance.choice(PATHS)]
    if chance.random() < 0.1:
        paths = paths[: chance.randrange(2)]
    tag = ["--tag", chance.choice(TAGS)] if chance.random() < 0.3 else []
    tool = chance.choice(["inspect", "verify", "convert", "convert", "convert", "universal", "fp32", "fp32"])
    if tool == "convert":
        to = ["--to", chance.choice(["fp32", "bf16", "universal", "deepspeed", "native", "other"])]
        flags = [flag for flag in ("--torch", "--with-classes") if chance.random() < 0.15]
        return tool, [tool, *paths, *to, *tag, *flags, *some(["--ranks", "--stage", "--max_shard_size"])]
    if tool == "universal":
        named = [word for pair in zip(("--input_folder", "--output_folder"), paths, strict=False) for word in pair]
        return tool, [*named, *some(["--num_extract_workers", "--num_merge_workers"])]
    if tool == "fp32":
        flags = [flag for flag in ("--safe_serialization", "--exclude_frozen_parameters") if chance.random() < 0.3]
        return tool, [*paths, *tag, *flags, *some(["--max_shard_size", "--dtype"])]
    return tool, [tool, *paths[:1], *tag]


def call(tool: str, arguments: list[str]) -> None:
    """Only an exit or an error of ours comes out."""
    try:
        if tool == "universal":
            ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
        elif tool == "fp32":
            zero_to_fp32.main(arguments)
        else:
            program.main(arguments)
    except (SystemExit, DeepSpeedError):
        pass


def test_random_invocations_destroy_nothing(runs, capsys):
    chance = random.Random(20261116)
    kept = {name: hashed(runs / name) for name in ("runs", "full")}
    for number in range(INVOCATIONS):
        tool, arguments = command(chance)
        try:
            call(tool, arguments)
        except BaseException as error:
            raise AssertionError(f"{number}: {tool} {arguments!r}") from error
        for name, before in kept.items():
            after = hashed(runs / name)
            assert {key: after.get(key) for key in before} == before, f"{number}: {tool} {arguments!r}"
        text = "".join(capsys.readouterr())
        assert "\x1b[2J" not in text, f"{number}: {tool} {arguments!r}"
        for path in runs.iterdir():  # outputs would be in the way of later ones
            if path.name not in ("runs", "link", "taglink", "full"):
                remove(path)
    assert open_checkpoint(find_tag(runs / "runs")).world == 2


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    else:
        path.unlink()
