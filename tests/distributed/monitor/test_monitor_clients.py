"""Each monitor against its real client library, offline, on two ranks of which only the first writes."""

from __future__ import annotations

import json
import os
import struct
import zipfile

import pytest
import torch.distributed as dist

from deepspeed.config.monitor import CometConfig, CSVConfig, DeepSpeedMonitorConfig, WandbConfig
from deepspeed.events import EventStream, StepFinished
from deepspeed.monitor.monitor import CometMonitor, MonitorMaster, MonitorSubscriber, WandbMonitor, csvMonitor
from deepspeed.profiling.progress import StepLine
from tests.harness import ranks

EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 1.25, 8), ("Train/Samples/lr", 0.25, 16)]


def wandb_records(path):
    """The records of an offline run: blocks of 32 KiB, fragments with checksum, length and kind, as in LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last fragment of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.slow
@ranks(2)
def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    folder = str(tmp_path / str(dist.get_rank()))
    os.makedirs(folder)
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        os.environ[name] = folder
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DISABLE_GIT="true", WANDB_DISABLE_CODE="true")
    monitor = WandbMonitor(WandbConfig(enabled=True, group="g", team="t", project="p"))
    monitor.write_events(EVENTS)
    monitor.close()
    wandb.teardown()  # the client's service process writes the file after finish() has returned
    files = list((tmp_path / str(dist.get_rank())).glob("wandb/offline-run-*/*.wandb"))
    if dist.get_rank() != 0:
        assert files == []
        assert monitor.run is None
        return
    records = list(wandb_records(files[0]))
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.entity) == ("p", "g", "t")
    history = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history[row["_step"]] = {key: value for key, value in row.items() if not key.startswith("_")}
    assert history == {8: {"Train/Samples/lr": 0.5, "Train/Samples/train_loss": 1.25}, 16: {"Train/Samples/lr": 0.25}}


@pytest.mark.slow
@ranks(2)
def test_comet_offline(tmp_path):
    pytest.importorskip("comet_ml")
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    os.environ.update(COMET_OFFLINE_DIRECTORY=str(folder), HOME=str(folder), COMET_LOGGING_CONSOLE="ERROR")
    for name in ("ENV_DETAILS", "ENV_GPU", "ENV_CPU", "ENV_HOST", "GIT_METADATA", "GIT_PATCH", "CODE", "GRAPH"):
        os.environ[f"COMET_AUTO_LOG_{name}"] = "0"
    key = "a-key-that-nobody-may-see"
    monitor = CometMonitor(
        CometConfig(enabled=True, online=False, project="p", workspace="w", experiment_name="n", api_key=key)
    )
    monitor.write_events([*EVENTS, ("Train/Samples/lr", 0.125, 108)])
    monitor.close()
    archives = list(folder.glob("*.zip"))
    if dist.get_rank() != 0:
        assert archives == []
        return
    with zipfile.ZipFile(archives[0]) as archive:
        experiment = json.loads(archive.read("experiment.json"))
        messages = archive.read("messages.json").decode()
    assert (experiment["project_name"], experiment["workspace"]) == ("p", "w")
    assert key not in messages
    metrics = [m["payload"]["metric"] for m in map(json.loads, messages.splitlines()) if m["type"] == "metric_msg"]
    ours = {
        (m["metricName"], float(m["metricValue"]), m["step"]) for m in metrics if m["metricName"].startswith("Train")
    }
    assert ours == {  # 16 lies within 100 samples of 8
        ("Train/Samples/lr", 0.5, 8),
        ("Train/Samples/train_loss", 1.25, 8),
        ("Train/Samples/lr", 0.125, 108),
    }


@ranks(2)
def test_tensorboard_and_csv_from_rank_0_only(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / str(dist.get_rank())
    section = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    monitor = MonitorMaster(DeepSpeedMonitorConfig(tensorboard=section, csv_monitor=section))
    assert monitor.enabled
    monitor.write_events(EVENTS)
    if dist.get_rank() != 0:
        assert not folder.exists()
        return
    read = EventAccumulator(str(folder / "job")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("Train/Samples/lr")] == [(8, 0.5), (16, 0.25)]
    assert (folder / "job/Train_Samples_lr.csv").read_text().split() == ["step,lr", "8,0.5", "16,0.25"]


@ranks(2, init=False)
def test_before_the_process_group_the_environment_tells_the_rank(tmp_path):
    folder = tmp_path / os.environ["RANK"]
    csvMonitor(CSVConfig(enabled=True, output_path=str(folder))).write_events([("a", 1, 1)])
    assert folder.exists() == (os.environ["RANK"] == "0")


@ranks(2)
def test_other_ranks_do_not_even_listen(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    events = EventStream()
    MonitorSubscriber(MonitorMaster(DeepSpeedMonitorConfig(csv_monitor=section))).attach(events)
    assert events.wants(StepFinished) == (dist.get_rank() == 0)
    lines = EventStream()
    StepLine(10).attach(lines)
    assert lines.wants(StepFinished) == (dist.get_rank() == 0)
