"""A backend that is missing or broken warns once, says what to do, and never stops training."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from deepspeed.config.monitor import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.log import logger
from deepspeed.monitor.monitor import Backend, CometMonitor, TensorBoardMonitor, WandbMonitor, csvMonitor

SECRET = "hunter2-hunter2"


@pytest.fixture
def warnings():
    kept = []

    class Keep(logging.Handler):
        def emit(self, record):
            kept.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    yield kept
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("kind", "config", "module", "package"),
    [
        (TensorBoardMonitor, TensorBoardConfig, "torch.utils.tensorboard", "tensorboard"),
        (WandbMonitor, WandbConfig, "wandb", "wandb"),
        (CometMonitor, CometConfig, "comet_ml", "comet_ml"),
    ],
)
def test_a_missing_library_is_told_once_with_the_key_and_the_cure(monkeypatch, warnings, kind, config, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    monitor = kind(config(enabled=True))
    for step in range(3):
        monitor.write_events([("a", 1.0, step)])
    monitor.close()
    assert len(warnings) == 1
    assert f"pip install {package}" in warnings[0]
    assert f'"{monitor.key}": {{"enabled": false}}' in warnings[0]


def test_a_folder_that_cannot_be_made(tmp_path, warnings):
    (tmp_path / "file").write_text("")
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path / "file")))
    monitor.write_events([("a", 1, 1)])
    assert len(warnings) == 1
    assert warnings[0].startswith("csv_monitor could not be opened")
    assert "Repair the cause" in warnings[0]


def test_writing_is_tried_again_after_a_failure(tmp_path, warnings):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events([("a", torch.ones(2), 1)])  # no number
    monitor.write_events([("a", torch.ones(2), 2)])
    monitor.write_events([("a", 3, 3)])
    assert len(warnings) == 1
    assert (tmp_path / "job/a.csv").read_text().split() == ["step,a", "3,3"]


def test_the_api_key_is_masked_when_the_client_repeats_it(monkeypatch, warnings):
    library = ModuleType("comet_ml")

    def start(*, api_key, **rest):
        raise ValueError(f"the key {api_key} is not valid")

    library.start = start
    monkeypatch.setitem(sys.modules, "comet_ml", library)
    CometMonitor(CometConfig(enabled=True, api_key=SECRET))
    assert "the key *** is not valid" in warnings[0]
    assert SECRET not in warnings[0]


def test_an_interrupt_is_not_swallowed(monkeypatch, tmp_path):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path)))

    def interrupted(entries):
        raise KeyboardInterrupt

    monkeypatch.setattr(monitor, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.write_events([("a", 1, 1)])


def test_a_failing_close_is_told_too(monkeypatch, tmp_path, warnings):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path)))
    monkeypatch.setattr(monitor, "_close", lambda: 1 / 0)
    monitor.close()
    assert "could not be closed" in warnings[0]


def test_every_backend_names_its_section():
    assert {kind.key for kind in Backend.__subclasses__()} >= {"tensorboard", "wandb", "comet", "csv_monitor"}
