"""The environment of real DeepSpeed: made once, made again when half-made, and never a reason to stop."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import environments
from benchmarks.environments import DeepSpeedEnvironment, EnvironmentUnavailable, Step, assemble, check
from benchmarks.processes import Contender

CREATE = (
    "import pathlib, sys; bin = pathlib.Path(sys.argv[1]) / 'bin'; bin.mkdir(parents=True); (bin / 'python').touch()"
)


def environment(tmp_path, *more: Step) -> DeepSpeedEnvironment:
    folder = tmp_path / "bench" / "deepspeed"
    create = Step("create", (sys.executable, "-c", CREATE, str(folder)))
    return DeepSpeedEnvironment(folder, recipe=(create, *more))


def failing(*, required: bool) -> Step:
    return Step("install", (sys.executable, "-c", "raise SystemExit('no such package')"), required=required)


def test_made_once(tmp_path):
    said: list[str] = []
    made = environment(tmp_path)
    made.ensure(said.append)
    assert made.is_made()
    assert said[0] == "making deepspeed (1 of 1): create"
    assert json.loads(made.stamp.read_text())["key"]["deepspeed"] == "0.19.8"
    said.clear()
    made.ensure(said.append)
    assert said == []


@pytest.mark.parametrize("stamp", [None, "{", "[]", '{"key": {"deepspeed": "0.1"}}'])
def test_a_half_made_or_outdated_one_is_made_again(tmp_path, stamp):
    made = environment(tmp_path)
    made.folder.mkdir(parents=True)
    (made.folder / "leftover").touch()
    if stamp is not None:
        made.stamp.write_text(stamp)
    made.ensure(lambda line: None)
    assert made.is_made()
    assert not (made.folder / "leftover").exists()


def test_a_failed_step_is_one_line_and_leaves_nothing_that_counts_as_made(tmp_path):
    made = environment(tmp_path, failing(required=True))
    with pytest.raises(EnvironmentUnavailable, match=r"^install: no such package$"):
        made.ensure(lambda line: None)
    assert not made.is_made()


def test_an_optional_step_may_fail(tmp_path):
    said: list[str] = []
    made = environment(tmp_path, failing(required=False))
    made.ensure(said.append)
    assert made.is_made()
    assert "install failed, going on: no such package" in said


def test_torch_stays_pinned_in_every_installation(tmp_path):
    steps = DeepSpeedEnvironment(tmp_path).steps()
    installations = [step.command for step in steps if "install" in step.command]
    assert len(installations) == 3
    assert all("torch==2.13.0" in command for command in installations)
    assert "deepspeed==0.19.8" in installations[1]


def test_the_run_goes_on_without_deepspeed(tmp_path, monkeypatch):
    def ensure(self, say):
        raise EnvironmentUnavailable("torch 2.13.0: no network")

    monkeypatch.setattr(DeepSpeedEnvironment, "ensure", ensure)
    monkeypatch.setattr(environments, "check", lambda contender: {"torch": "2.13.0"})
    contenders, versions, missing = assemble(["ours", "deepspeed", "torch"], {}, lambda line: None, tmp_path)
    assert [contender.name for contender in contenders] == ["ours", "torch"]
    assert set(versions) == {"ours", "torch"}
    assert missing == {"deepspeed": "torch 2.13.0: no network"}
    assert contenders[0].variables == {"PYTHONPATH": str(environments.ROOT)}
    assert contenders[1].variables == {}


def test_a_given_interpreter_is_used_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "probe", lambda contender: {"torch": "2.11.0", "deepspeed": "0.19.8"})
    contenders, _, _ = assemble(["deepspeed"], {"deepspeed": "/elsewhere/python"}, lambda line: None, tmp_path)
    assert contenders[0].python == "/elsewhere/python"
    monkeypatch.setattr(environments, "probe", lambda contender: {"torch": "2.11.0", "deepspeed": "0.20.0"})
    _, _, missing = assemble(["deepspeed"], {"deepspeed": "/elsewhere/python"}, lambda line: None, tmp_path)
    assert missing == {"deepspeed": "imports deepspeed 0.20.0, expected 0.19.8"}


def test_a_contender_that_does_not_start_is_left_out(tmp_path):
    _, _, missing = assemble(["torch"], {"torch": str(tmp_path / "none")}, lambda line: None, tmp_path)
    assert missing == {"torch": "cannot start none: No such file or directory"}


def test_ours_must_not_be_the_real_one(monkeypatch):
    monkeypatch.setattr(environments, "probe", lambda contender: {"torch": "2.13.0", "deepspeed": "0.19.8"})
    with pytest.raises(EnvironmentUnavailable, match="expected the one of this project"):
        check(Contender("ours", sys.executable))
