"""Checkpoints of pipelines: files of layers, any number of stages, none at all, and tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deepspeed
from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.universal.convert import convert
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.dataloader import RepeatingLoader
from tests.harness import shared_ranks, store_path
from tests.pipelines import assert_equal, config, data, loss_of, micro_batch, pipeline, train_pipeline, train_whole
from tests.told import Told


def folder(name: str) -> Path:
    return Path(f"{store_path()}-{name}")


def resumed(stages, path, steps, zero, **options):
    """Losses of further steps after loading, and the engine."""
    module = pipeline(stages, **options)
    engine, *_ = deepspeed.initialize(model=module, config=config(2, zero))
    found, client = engine.load_checkpoint(str(path))
    assert found is not None
    assert client["note"] == "kept"
    source = data(module.mpu().get_data_parallel_rank(), 2)
    for _ in range(2 * engine.global_steps):
        next(source)
    return [float(engine.train_batch(source)) for _ in range(steps)], engine


@shared_ranks(4)
def test_any_number_of_stages_reads_what_any_number_wrote():
    """(ZeRO stage, who writes, who reads): stages and schedule."""
    cases = [
        (0, (2, "1f1b"), (4, "1f1b")),
        (1, (4, "1f1b"), (2, "zbv")),
        (3, (2, "interleaved"), (4, "1f1b")),
    ]
    for zero, (stages, schedule), (others, another) in cases:
        _, engine = train_pipeline(stages, 2, 2, zero, schedule=schedule)
        path, end = folder(f"any{zero}"), train_whole(2, 4 // stages, 2)[1]
        engine.save_checkpoint(str(path), client_state={"note": "kept"})
        in_safetensors(engine).save_checkpoint(str(path), tag="native", client_state={"note": "kept"})
        engine.destroy()
        (path / "latest").write_text("global_step2")
        _, again = resumed(others, path, 0, zero, schedule=another)
        assert_equal(again, end)
        again.load_checkpoint(str(path), tag="native")
        assert_equal(again, end)
        again.destroy()
        if deepspeed.comm.get_rank() == 0:
            source = open_checkpoint(path / "native")
            assert set(source.shapes) == set(end), "tools see the whole model"
            assert all(torch.allclose(source.read(n, "master").view(v.shape), v, atol=1e-6) for n, v in end.items())
            assert {each.name for each in (path / "native").iterdir()} >= set(source.files)


def in_safetensors(engine):
    """The same engine, which writes its next checkpoint so."""
    files = engine._checkpoints
    files._section = files._section.model_copy(update={"format": "safetensors"})
    return engine


@shared_ranks(2)
def test_training_goes_on_as_if_it_had_not_stopped():
    expected, end = train_whole(4, 1, 2)
    for zero, schedule in ((0, "1f1b"), (2, "zb-h1")):
        files = {"checkpoint": {"format": "safetensors" if zero else "deepspeed"}}
        _, engine = train_pipeline(2, 2, 2, zero, schedule=schedule, config=files)
        path = folder(f"on{zero}")
        engine.save_checkpoint(str(path), client_state={"note": "kept"})
        engine.destroy()
        if zero:  # by way of a universal one
            if deepspeed.comm.get_rank() == 0:
                convert(path / "global_step2", path / "universal")
                (path / "latest").write_text("universal")
            deepspeed.comm.barrier()
        losses, again = resumed(2, path, 2, zero, schedule="zbv")
        assert losses == pytest.approx(expected[2:], abs=1e-6)
        assert_equal(again, end)
        again.destroy()


class Counting:
    """A loader with a state, of which every `iter` goes on from there."""

    def __init__(self, batches):
        self.batches, self.given = batches, 0

    def __iter__(self):
        for batch in self.batches[self.given :]:
            self.given += 1
            yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@shared_ranks(2)
def test_loaders_of_the_script_with_and_without_a_state():
    samples = [tuple(part[0] for part in micro_batch(number, 0, 0)) for number in range(24)]
    stateless = {
        "plain": lambda _: DataLoader(samples, batch_size=2),
        "repeated": lambda _: RepeatingLoader(DataLoader(samples, batch_size=2)),
    }
    stateful = {
        "counting": lambda _: Counting(list(DataLoader(samples, batch_size=2))),
        "shuffled": lambda engine: RepeatingLoader(engine.deepspeed_io(samples)),
    }
    for name, make in {**stateless, **stateful}.items():
        engine, again = (deepspeed.initialize(model=pipeline(2), config=config(2, 1))[0] for _ in "ab")
        for each in (engine, again):
            each.set_dataloader(make(each))
        engine.train_batch()
        engine.save_checkpoint(str(folder(name)))
        expected = [float(engine.train_batch()) for _ in range(2)]
        again.train_batch()  # the place that is loaded counts, not this one
        again.train_batch()
        again.load_checkpoint(str(folder(name)))
        if name in stateful:
            assert [float(again.train_batch()) for _ in range(2)] == pytest.approx(expected, abs=1e-6), name
        else:
            again.train_batch()
        engine.destroy()
        again.destroy()
    with Told() as lines:
        other = deepspeed.initialize(model=pipeline(2), config=config(2, 1))[0]
        other.set_dataloader(DataLoader(samples, batch_size=2))
        other.load_checkpoint(str(folder("counting")))
    assert ["a DataLoader has no load_state_dict" in line for line in lines] == [True] * (1 - deepspeed.comm.get_rank())


@shared_ranks(2)
def test_files_are_those_of_layers():
    _, engine = train_pipeline(2, 2, 1, 1, schedule="1f1b")
    path = folder("layers")
    engine.save_checkpoint(str(path), tag="t")
    names = sorted(os.listdir(path / "t"))
    assert [name for name in names if name.startswith("layer_")] == [
        f"layer_{number:02d}-model_states.pt" for number in range(7)
    ]
    layer = torch.load(path / "t" / "layer_03-model_states.pt", weights_only=True)
    assert list(layer) == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    model = torch.load(path / "t" / "mp_rank_01_model_states.pt", weights_only=False)
    assert model["module"] is None
    assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 1}
    _, end = train_whole(1, 1, 2)
    source = open_checkpoint(path / "t")
    assert set(source.shapes) == set(end)
    for name, value in end.items():
        assert torch.allclose(source.read(name, "master").view(value.shape), value, atol=1e-6), name


@shared_ranks(2)
def test_with_and_without_a_pipeline():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    batch = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(3, 2)
    module = PipelineModule(model(), num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=module, config=config(1, 1))
    engine.train_batch(iter([batch]))
    engine.save_checkpoint(str(folder("with")))
    after = float(engine.eval_batch(iter([batch])))
    engine.destroy()
    plain, *_ = deepspeed.initialize(model=model(), config=config(1, 2))
    plain.load_checkpoint(str(folder("with")))
    plain.eval()
    with torch.no_grad():
        assert float(nn.functional.mse_loss(plain(batch[0]), batch[1])) == pytest.approx(after, abs=1e-6)
    plain.train()
    plain.save_checkpoint(str(folder("without")))
    plain.destroy()
    back = PipelineModule(model(), num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=back, config=config(1, 1))
    engine.load_checkpoint(str(folder("without")))
    assert float(engine.eval_batch(iter([batch]))) == pytest.approx(after, abs=1e-6)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(13, 8))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


WRITTEN = Path(__file__).parents[2] / "fixtures" / "pipeline-deepspeed-0.19.8"
LOSSES = [2.5448598861694336, 2.6006484031677246, 2.4922709465026855]


@shared_ranks(2)
def test_what_deepspeed_wrote_is_read():
    """Written by DeepSpeed 0.19.8 after three steps on two ranks; the losses of its next three steps follow."""
    layers = [
        TiedLayerSpec("embed", Table),
        *(LayerSpec(nn.Linear, 8, 8) for _ in range(4)),
        TiedLayerSpec("embed", Table, forward_fn=lambda table, hidden: hidden @ table.weight.t()),
    ]
    adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    for zero, schedule in ((0, "1f1b"), (1, "zb-h1"), (1, "zbv")):
        module = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", schedule=schedule)
        engine, *_ = deepspeed.initialize(model=module, config=config(2, zero, optimizer=adam))
        engine.load_checkpoint(str(WRITTEN), tag=f"stage{zero}")
        assert engine.global_steps == 3
        generator = torch.Generator().manual_seed(2)
        source = iter([tuple(torch.randint(13, (2, 3), generator=generator) for _ in range(2)) for _ in range(6)])
        assert [float(engine.train_batch(source)) for _ in range(3)] == pytest.approx(LOSSES, abs=1e-6)
        engine.destroy()
