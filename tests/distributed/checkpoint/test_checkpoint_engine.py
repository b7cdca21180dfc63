"""A checkpoint engine of the user's own: it writes and reads every file, on any number of ranks and at any stage."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import CheckpointError, DeepSpeedConfigError, FeatureUnavailable, UsageError
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine, TorchCheckpointEngine
from tests.harness import shared_ranks


class Gzipped(CheckpointEngine):
    """Files that nobody else can read."""

    def __init__(self, commits=True):
        super().__init__()
        self.calls = []
        self.commits = commits

    def create(self, info):
        self.calls.append(f"create {info.tag}")

    def save(self, state_dict, path):
        self.calls.append("save")
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        Path(path).write_bytes(gzip.compress(buffer.getvalue(), 1))

    def load(self, path, map_location=None):
        self.calls.append("load")
        return torch.load(
            io.BytesIO(gzip.decompress(Path(path).read_bytes())), map_location=map_location, weights_only=False
        )

    def commit(self, info):
        self.calls.append(f"commit {info.tag}")
        return self.commits

    def cleanup(self):
        self.calls.append("cleanup")


class FromVendor(Gzipped):
    """As a package would bring it."""

    def __init__(self, config, rank):
        super().__init__()
        self.given = config, rank


def trained(stage, steps, plug=None, **sections):
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        **sections,
    }
    engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), config=config)
    if plug is not None:
        engine.checkpoint_engine = plug
    step(engine, steps)
    return engine


def step(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.arange(8.0).view(2, 4) / 8).sum())
        engine.step()


def weights(engine):
    return {name: deepspeed.utils.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


@shared_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_it_writes_and_reads_every_file(stage, tmp_path):
    plug = Gzipped()
    engine = trained(stage, 2, plug)
    assert engine.checkpoint_engine is plug
    assert engine.save_checkpoint(tmp_path, "here", client_state={"epoch": 5})
    assert plug.calls[0] == "create here"
    assert plug.calls[-1] == "commit here"
    assert "save" in plug.calls
    assert (tmp_path / "latest").read_text() == "here"
    files = list((tmp_path / "here").iterdir())
    assert files
    assert all(path.read_bytes()[:2] == b"\x1f\x8b" for path in files)
    step(engine, 1)
    expected = weights(engine)
    reader = Gzipped()
    other = trained(stage, 0, reader)
    path, client = other.load_checkpoint(tmp_path)
    assert Path(path).parent == tmp_path / "here"
    assert os.path.exists(path)
    assert client["epoch"] == 5
    assert "load" in reader.calls
    assert other.global_steps == 2
    step(other, 1)
    for name, value in weights(other).items():
        torch.testing.assert_close(value, expected[name])
    comm.barrier()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    other.destroy()
    assert reader.calls[-1] == "cleanup"


@shared_ranks(2)
def test_another_stage_reads_it(tmp_path):
    engine = trained(3, 2, Gzipped())
    engine.save_checkpoint(tmp_path)
    expected = weights(engine)
    other = trained(0, 0, Gzipped())
    other.load_checkpoint(tmp_path, "global_step2")
    for name, value in weights(other).items():
        torch.testing.assert_close(value, expected[name])


@shared_ranks(2)
def test_a_commit_that_refuses_is_an_error_and_latest_stays(tmp_path):
    engine = trained(1, 1, Gzipped())
    engine.save_checkpoint(tmp_path, "good")
    engine.checkpoint_engine = Gzipped(commits=comm.get_rank() == 0)
    with pytest.raises(CheckpointError, match=r"rank 1.*commit refused checkpoint 'bad'"):
        engine.save_checkpoint(tmp_path, "bad")
    assert (tmp_path / "latest").read_text() == "good"


@shared_ranks(2)
def test_nothing_to_load(tmp_path):
    engine = trained(1, 1, Gzipped())
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(UsageError, match="no directory"):
        engine.load_checkpoint(tmp_path, "nowhere")
    assert list(tmp_path.iterdir()) == []


@shared_ranks(1)
def test_the_default_and_what_is_none(tmp_path):
    engine = trained(0, 1)
    assert isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
    engine.checkpoint_engine = TorchCheckpointEngine()
    engine.save_checkpoint(tmp_path, "t")
    assert any("manifest" in path.name for path in (tmp_path / "t").iterdir())
    with pytest.raises(UsageError, match="takes a CheckpointEngine; found str"):
        engine.checkpoint_engine = "torch"
    made = TorchCheckpointEngine({})
    info = type("Info", (), {"tag": "x"})()
    made.create(info)
    assert made.get_commit_info() is info
    made.makedirs(str(tmp_path / "own"))
    made.save({"a": torch.ones(2)}, str(tmp_path / "own" / "file.pt"))
    assert made.load(str(tmp_path / "own" / "file.pt"), map_location="cpu")["a"].tolist() == [1, 1]
    assert made.commit(info)
    assert (made.is_data_parallel_writer(0), made.is_data_parallel_writer(1)) == (True, False)
    assert not made.is_decoupled()


def install(folder, name, value):
    """A package that registers an entry point, as pip would leave it."""
    place = folder / f"{name}-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text(f"[deepspeed.checkpoint_engines]\n{name} = {value}\n")


@shared_ranks(1)
def test_an_installed_package_brings_the_engine_that_a_section_asks_for(tmp_path):
    section = {"nebula": {"enabled": True, "persistent_time_interval": 10}}
    with pytest.raises(FeatureUnavailable, match="no package registers 'nebula' as an entry"):
        trained(1, 1, **section)
    sys.path.insert(0, str(tmp_path / "packages"))
    install(tmp_path / "packages", "nebula", f"{__name__}:FromVendor")
    engine = trained(1, 1, **section)
    plug = engine.checkpoint_engine
    config, rank = plug.given
    assert (config["nebula"], rank) == (section["nebula"], 0)
    engine.save_checkpoint(tmp_path / "saved")
    other = trained(1, 0, **section)
    other.load_checkpoint(tmp_path / "saved")
    assert other.global_steps == 1
    assert "load" in other.checkpoint_engine.calls
    assert type(trained(1, 0).checkpoint_engine) is TorchCheckpointEngine
    install(tmp_path / "packages", "datastates_ckpt", "torch.nn:Bilinear")
    with pytest.raises(DeepSpeedConfigError, match="datastates_ckpt and nebula ask for a checkpoint engine each"):
        trained(1, 0, datastates_ckpt={}, **section)
