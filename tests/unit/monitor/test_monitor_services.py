"""How the services are called: arguments, thinning, and who ends a run."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.monitor import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.monitor import CometMonitor, TensorBoardMonitor, WandbMonitor, csvMonitor


class Run:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values, step):
        self.logged.append((values, step))

    def finish(self):
        self.finished = True


class Experiment:
    def __init__(self):
        self.logged, self.name, self.ended = [], None, False

    def set_name(self, name):
        self.name = name

    def log_metric(self, name, value, step):
        self.logged.append((name, value, step))

    def end(self):
        self.ended = True


def test_wandb_starts_a_run_logs_each_metric_and_finishes(monkeypatch):
    run, given_arguments = Run(), {}

    def init(**arguments):
        given_arguments.update(arguments)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=init))
    monitor = WandbMonitor(WandbConfig(enabled=True, group="g", team="t", project="p"))
    monitor.write_events([("a", 1, 8), ("b", 2, 8)])
    monitor.close()
    assert given_arguments == {"project": "p", "group": "g", "entity": "t"}
    assert run.logged == [({"a": 1}, 8), ({"b": 2}, 8)]
    assert run.finished
    assert (monitor.group, monitor.team, monitor.project) == ("g", "t", "p")


def test_wandb_uses_the_script_s_own_run_and_leaves_it_open(monkeypatch):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, init=lambda **_: pytest.fail("second run")))
    monitor = WandbMonitor(WandbConfig(enabled=True))
    monitor.write_events([("a", 1, 8)])
    monitor.close()
    assert run.logged == [({"a": 1}, 8)]
    assert not run.finished


@pytest.fixture
def comet(monkeypatch):
    experiment, calls = Experiment(), []

    def start(**arguments):
        calls.append(arguments)
        return experiment

    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=start))
    return experiment, calls


def test_comet_receives_the_section_as_it_is(comet):
    experiment, calls = comet
    settings = {"api_key": "k", "project": "p", "workspace": "w", "experiment_key": "e", "mode": "create"}
    monitor = CometMonitor(CometConfig(enabled=True, online=True, experiment_name="n", **settings))
    monitor.close()
    assert calls == [{**settings, "online": True}]
    assert experiment.name == "n"
    assert experiment.ended
    assert monitor.experiment is experiment


def test_comet_thins_out_each_metric_on_its_own(comet):
    experiment, _ = comet
    monitor = CometMonitor(CometConfig(enabled=True, samples_log_interval=100))
    monitor.write_events([("a", 1, 10)])
    monitor.write_events([("a", 2, 60), ("b", 2, 60)])
    monitor.write_events([("a", 3, 110), ("b", 3, 159)])
    assert experiment.logged == [("a", 1, 10), ("b", 2, 60), ("a", 3, 110)]
    assert experiment.name is None


@given(interval=st.integers(1, 50), steps=st.lists(st.integers(0, 500), max_size=40).map(sorted))
def test_comet_never_logs_closer_than_the_interval_nor_waits_longer(interval, steps):
    experiment = Experiment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=lambda **_: experiment))
        monitor = CometMonitor(CometConfig(enabled=True, samples_log_interval=interval))
    for step in steps:
        monitor.write_events([("a", 0, step)])
    logged = [step for *_, step in experiment.logged]
    assert logged[:1] == steps[:1]
    assert all(after - before >= interval for before, after in itertools.pairwise(logged))
    for step in steps:  # a step that was left out lies within the interval of the one before it
        assert step in logged or any(0 <= step - kept < interval for kept in logged)


def test_methods_that_scripts_call(monkeypatch, tmp_path):
    run = SimpleNamespace(log=lambda data, step, commit: run.seen.append((data, step, commit)), seen=[])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    WandbMonitor(WandbConfig(enabled=True)).log({"loss": 1.0}, step=3)
    assert run.seen == [({"loss": 1.0}, 3, None)]
    board = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="run"))
    board.get_summary_writer().add_scalar("loss", 1.0, 1)
    board.flush()
    assert list((tmp_path / "run").iterdir())
    board.close()
    rows = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name="rows"))
    assert rows.setup_log_dir() == str(tmp_path / "rows")
