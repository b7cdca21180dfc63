"""TensorBoard and CSV monitors: what lies on disk after a call."""

from __future__ import annotations

import csv
import os

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspeed.config.monitor import CSVConfig, DeepSpeedMonitorConfig, TensorBoardConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor.monitor import Monitor, MonitorMaster, TensorBoardMonitor, csvMonitor


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_writes_one_file_per_label_with_a_header(tmp_path):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events([("Train/Samples/lr", 0.5, 8), ("My metric/top 1", torch.tensor(3), 8)])
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    assert sorted(os.listdir(tmp_path / "job")) == ["My_metric_top_1.csv", "Train_Samples_lr.csv"]
    assert rows(tmp_path / "job/Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]
    assert rows(tmp_path / "job/My_metric_top_1.csv") == [["step", "top 1"], ["8", "3"]]


def test_a_resumed_run_appends_numbers_only(tmp_path):
    config = CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    for step in (1, 2):
        csvMonitor(config).write_events([("a", step, step)])
    assert rows(tmp_path / "job/a.csv") == [["step", "a"], ["1", "1"], ["2", "2"]]


def test_an_empty_output_path_is_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    csvMonitor(CSVConfig(enabled=True, job_name="job")).write_events([("a", 1, 1)])
    assert (tmp_path / "job/a.csv").exists()


def test_tensorboard_events_can_be_read_before_close(tmp_path):
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", torch.tensor(1.5), 8)])
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    read = EventAccumulator(str(tmp_path / "job")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["Train/Samples/lr", "Train/Samples/train_loss"]
    assert [(e.step, e.value) for e in read.Scalars("Train/Samples/lr")] == [(8, 0.5), (16, 0.25)]
    assert [(e.step, e.value) for e in read.Scalars("Train/Samples/train_loss")] == [(8, 1.5)]
    monitor.close()


def test_the_attributes_that_scripts_read(tmp_path):
    config = TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = TensorBoardMonitor(config)
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "job")
    assert isinstance(monitor, Monitor)
    monitor.close()


def test_a_disabled_monitor_creates_nothing(tmp_path):
    for kind, config in ((TensorBoardMonitor, TensorBoardConfig), (csvMonitor, CSVConfig)):
        monitor = kind(config(enabled=False, output_path=str(tmp_path)))
        monitor.write_events([("a", 1, 1)])
        monitor.close()
    assert os.listdir(tmp_path) == []


def test_the_master_writes_to_every_enabled_monitor_and_stops_after_close(tmp_path):
    config = DeepSpeedMonitorConfig(
        tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "tb"},
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
    )
    master = MonitorMaster(config)
    assert master.enabled
    assert (master.wandb_monitor, master.comet_monitor) == (None, None)
    master.write_events(("a", value, value) for value in (1, 2))
    master.close()
    master.close()
    master.write_events([("a", 3, 3)])
    assert rows(tmp_path / "csv/a.csv") == [["step", "a"], ["1", "1"], ["2", "2"]]
    assert [e.step for e in EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("a")] == [1, 2]


def test_a_master_without_monitors_is_harmless():
    master = MonitorMaster(DeepSpeedMonitorConfig())
    assert not master.enabled
    master.write_events([("a", 1, 1)])
    master.close()


def test_monitor_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Monitor({})


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/abs/x", "a\0b", "x" * 5000])
def test_a_job_name_stays_inside_the_folder(tmp_path, name):
    folder = tmp_path / "runs"
    for config in (CSVConfig, TensorBoardConfig):
        parts = {"csv_monitor" if config is CSVConfig else "tensorboard": config(enabled=True, job_name=name)}
        given = next(iter(parts.values())).model_copy(update={"output_path": str(folder)})
        with pytest.raises(DeepSpeedConfigError, match="job_name"):
            MonitorMaster(DeepSpeedMonitorConfig(**dict.fromkeys(parts, given)))
    assert list(tmp_path.iterdir()) == []


def test_a_job_name_may_have_parts(tmp_path):
    for name in ("group/run", "a..b", "", ".hidden"):
        csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name=name)).write_events([("../m", 1, 1)])
        assert (tmp_path / name / ".._m.csv").exists()


def test_a_folder_with_nul_is_told():
    with pytest.raises(DeepSpeedConfigError, match=r"csv_monitor.output_path .* NUL"):
        csvMonitor(CSVConfig(enabled=True, output_path="a\0b"))
