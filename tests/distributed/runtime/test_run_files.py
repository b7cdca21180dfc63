"""The `events` and `trace` sections on two ranks: what the files tell is what happened."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import shared_ranks

WIDTH, STEPS = 16, 4


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, input_ids):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def build(stage, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
        **sections,
    }
    return deepspeed.initialize(model=Tagger(), config=config)[0]


def train(engine, steps=STEPS, seen=None):
    losses = []
    for _ in range(steps):
        if seen is not None:
            seen.clear()
        total = 0.0
        for _ in range(2):
            loss = engine(torch.arange(6).view(2, 3))
            total += loss.item() / 2
            engine.backward(loss)
            engine.step()
        losses.append(total)
    return losses


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@shared_ranks(2)
def test_files_of_events_and_traces(tmp_path):
    folder, rank = tmp_path, comm.get_rank()
    for stage in (0, 2, 3):
        seen = []
        end = comm.dispatcher.tell(seen.append)
        trace = {"steps": [1, 2], "ranks": [0, 1], "folder": str(folder / f"traces{stage}")}
        engine = build(stage, events={"file": str(folder / f"run{stage}")}, trace=trace)
        losses = train(engine, seen=seen)
        end()
        engine.save_checkpoint(str(folder / "checkpoints"))
        norm = engine.get_global_grad_norm()
        engine.destroy()
        records = read(folder / f"run{stage}.rank{rank:05d}.jsonl")
        steps = [each for each in records if each["kind"] == "step"]
        assert [each["step"] for each in steps] == [1, 2, 3, 4]
        assert [each["loss"] for each in steps] == pytest.approx(losses)
        assert steps[-1]["norm"] == pytest.approx(norm)
        assert {each["tokens"] for each in steps} == {12}
        assert (records[0]["stage"], records[0]["world"], records[0]["parameters"]) == (stage, 2, 8 * 16 + 3 * 16 * 17)
        assert [each.get("state") for each in records if each["kind"] == "checkpoint"] == ["began", "finished"]
        kinds = next(each for each in records if each["kind"] == "memory")["kinds"]
        assert kinds["moments"] == pytest.approx(8 * (8 * 16 + 3 * 16 * 17) / (1 if stage == 0 else 2), rel=0.1)
        told = [each["comm"] for each in steps if "comm" in each][-1]
        sent = Counter(entry[1].name for entry in seen if entry[4] is not None and entry[1].name != "new_group")
        assert {row["op"]: row["count"] for row in told} == dict(sent), "the operations of the last step"
        _check_trace(folder / f"traces{stage}", {row["op"] for row in told})


def _check_trace(folder, operations):
    comm.barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [each for each in events if each.get("pid", -1) // 1000 == rank and each.get("ph") in "XC"]
        names = Counter(each["name"] for each in mine)
        assert (names["deepspeed: forward"], names["deepspeed: step"]) == (4, 2)
        assert names["memory by kind"]
        assert names["memory of the host"]
        traced = {name.split(" ")[1].rstrip(":") for name in names if name.startswith("deepspeed: ")}
        assert operations <= traced
        begin, end = ([each for each in mine if each["name"] == "deepspeed: step"][i] for i in (0, -1))
        assert begin["ts"] < end["ts"] < begin["ts"] + 600e6


@shared_ranks(2)
def test_two_engines_an_interval_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_EVENTS", str(tmp_path / "deep" / "run.jsonl"))
    engines = [build(1, events={"every": 2}) for _ in range(2)]
    for engine in engines:
        train(engine)
        engine.destroy()
    for name in ("run", "run-2"):
        steps = read(tmp_path / "deep" / f"{name}.rank{comm.get_rank():05d}.jsonl")
        assert [each["step"] for each in steps if each["kind"] == "step"] == [2, 4]
    monkeypatch.delenv("DS_EVENTS")
    engine = build(1)
    assert comm.dispatcher._notes == ()
    engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match=r"trace\.ranks has 2, and this job has 2 ranks"):
        build(1, trace={"steps": [1, 1], "ranks": [0, 2]})
    with pytest.raises(DeepSpeedConfigError, match=r"first and the last step"):
        build(1, trace={"steps": [3, 1]})
