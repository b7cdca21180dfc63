"""`ds_plan` from its words to its status; what is wrong is said in a sentence with the option or key."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.planning.ceilings import DEVICES, as_json, device_of
from deepspeed.planning.command import main
from deepspeed.planning.planner import Cluster
from deepspeed.planning.trace import filled
from tests.harness import ranks

SCRIPT = """
from tests.unit.planning.planned import Decoder, example_batch
def build_model():
    return Decoder()
def takes_width(width):
    return Decoder(width)
class Fails(Decoder):
    def forward(self, tokens, labels):
        return super().forward(tokens.float(), labels)
if __name__ == "__main__":
    raise SystemExit("it trains")
"""
TRAINS = """
import torch
model = torch.nn.Linear(64, 64)
model(torch.ones(64, 64)).sum().backward()
"""
SIZES = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "trains.py").write_text(TRAINS, encoding="utf-8")
    (tmp_path / "empty.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "parses.py").write_text("import sys; sys.exit(2)\n", encoding="utf-8")
    (tmp_path / "raises.py").write_text("import there_is_none\n", encoding="utf-8")
    (tmp_path / "reads.py").write_text("def build_model(): open('weights.bin')\n", encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps({**SIZES, "zero_optimization": {"stage": 0}}), encoding="utf-8")
    (tmp_path / "batch.json").write_text(json.dumps({**SIZES, "train_batch_size": 6}), encoding="utf-8")
    auto = {**SIZES, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "auto.json").write_text(json.dumps(auto), encoding="utf-8")
    return tmp_path


@ranks(1, init=False)
def run_alone(folder, words):
    """The command in a process that is in no group."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    Path("told.json").write_text(json.dumps([status, out.getvalue(), err.getvalue()]), encoding="utf-8")


def told(folder, *words):
    run_alone(folder=str(folder), words=list(words))
    return json.loads((folder / "told.json").read_text(encoding="utf-8"))


def test_what_fits_and_what_does_not(job):
    words = ["model.py", "auto.json", "--batch", "4", "--world", "4", "--device", "h200", "--json", "--html", "p.html"]
    status, out, _ = told(job, *words)
    found = json.loads(out)
    assert status == 0
    assert found["memory"]["fits"] is True
    assert found["links"]["within"] > 0
    assert found["time"]["step"] > 0
    assert "<script" not in (job / "p.html").read_text(encoding="utf-8")
    peak = found["memory"]["peak"]
    words = ["model.py", "ds.json", "--world", "4", "--memory", str(int(peak * 0.8)), "--json", "--fit", "fit.json"]
    status, out, _ = told(job, *words)
    again = json.loads(out)
    assert status == 1
    assert again["memory"]["fits"] is False
    assert all(each["peak"] <= 0.8 * peak for each in again["proposals"]), "proposals are planned, not guessed"
    fitting = json.loads((job / "fit.json").read_text(encoding="utf-8"))
    status, out, _ = told(job, "model.py", "fit.json", "--world", "4", "--memory", str(int(peak * 0.8)), "--json")
    assert status == 0, fitting
    assert json.loads(out)["batch"]["train"] == found["batch"]["train"], "as many samples a step"
    status, _, err = told(job, "model.py", "fit.json", "--memory", "1000", "--fit", "none.json")
    assert status == 1, "nothing fits"
    assert "none.json is not written" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py", "ds.json"], "nowhere.py is no file"),
        (["trains.py", "ds.json"], "trains.py trains when it is imported"),
        (["empty.py", "ds.json"], "empty.py has no model_fn or build_model"),
        (["parses.py", "ds.json"], "parses.py ended the program when it was imported"),
        (["reads.py", "ds.json"], "reads no data and no weights"),
        (["raises.py", "ds.json"], "in line 1 of raises.py: ModuleNotFoundError"),
        (["model.py:takes_width", "ds.json"], "takes_width() takes arguments"),
        (["model.py:Fails", "ds.json"], "ds_plan: error: a step of model.py:Fails failed: RuntimeError"),
        (["model.py", "batch.json", "--world", "4"], "train_batch_size"),
        (["model.py", "auto.json"], 'train_micro_batch_size_per_gpu is "auto" in the config; say --batch'),
        (["model.py", "ds.json", "--device", "h20"], "did you mean h200?"),
        (["model.py", "ds.json", "--world", "12"], "per_node 8 does not divide world 12"),
        (["model.py", "ds.json", "--advise"], "no memory is named"),
    ],
)
def test_what_cannot_be_planned(job, words, said):
    status, _, err = told(job, *words)
    assert status == 2
    assert said in err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.py"],
        ["m.py", "d.json", "--memory", "0"],
        ["m.py", "d.json", "--world", "0"],
        ["m.py", "d.json", "--html", "absent/plan.html"],
    ],
)
def test_wrong_words(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_auto_is_what_clients_take():
    adam = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}
    sections = {"bf16": {"enabled": "auto"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    given = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "optimizer": adam, **sections}
    made = {"gradient_accumulation_steps": 1, "optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}
    assumed: list[str] = []
    assert filled(given, assumed) == {**made, "bf16": {"enabled": True}}
    assert assumed == ['gradient_accumulation_steps is "auto", taken as 1', 'bf16.enabled is "auto", taken as true']
    for half, taken in ((True, False), (False, True), ("auto", True)):
        both = filled({**given, "fp16": {"enabled": half}}, [])
        assert both["bf16"]["enabled"] is taken, "one of them at most"
        assert both["fp16"]["enabled"] is (half is True)


def test_devices(tmp_path):
    assert all(device.source for device in DEVICES.values())
    own = tmp_path / "own.json"
    own.write_text(as_json(DEVICES["h200"]), encoding="utf-8")
    assert device_of(str(own)) == DEVICES["h200"]
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"setting": {"hosts": 1}, "results": [{"bus": 5e9}, {"bus": 7e9}]}), encoding="utf-8")
    assert device_of(f"h200,{links}").within == 7e9
    for name, said in ((str(links), "no memory"), ("no.json", "cannot be read"), ("x", "not known")):
        with pytest.raises(UsageError, match=said):
            device_of(name)


@pytest.mark.parametrize("sizes", [{"world": 0}, {"per_node": 0}, {"memory": 0}, {"world": 12, "per_node": 8}])
def test_sizes_of_a_cluster(sizes):
    with pytest.raises(DeepSpeedError):
        Cluster(**sizes)
