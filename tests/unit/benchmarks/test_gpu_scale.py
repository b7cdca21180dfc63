"""The script for rank 0 of many on one device, as far as it goes without one: sizes, paths, tables, failures."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks import gpu_scale, scale_child
from benchmarks.case import Job
from benchmarks.gpu_scale import MEASURES, PLAN, ROOT, chosen, contender_of, main, parser, table
from benchmarks.llama_child import SHAPES, make_config
from tests.harness import ranks


def result(tokens_s=1000.0, peak=10.0, loss=9.0):
    given = {"tokens_s": tokens_s, "peak_gib": peak, "first_peak_gib": peak + 1, "loss": loss}
    return {measure.name: given.get(measure.name, 1.0) for measure in MEASURES}


def row(found, name):
    return next(line for line in table(found) if f" {name} " in line)


def elements(shape):
    hidden, layers, *_, vocabulary, _, _ = SHAPES[shape]
    return layers * scale_child.layer_elements(shape) + 2 * vocabulary * hidden + hidden


def test_the_shapes_have_their_sizes():
    assert round(elements("7b") / 1e9, 1) == 7.2
    assert round(elements("1b") / 1e9, 1) == 1.1


def test_keys_of_a_flavour():
    assert scale_child.zero_section("2", "7b") == {"stage": 2}
    block = scale_child.layer_elements("7b")
    assert scale_child.zero_section("3-block", "7b") == {
        "stage": 3,
        "stage3_prefetch_bucket_size": block,
        "reduce_bucket_size": block,
    }


def test_what_is_measured_by_default_and_by_choice():
    keys = chosen(parser().parse_args([]))
    assert len(keys) == 22
    assert {(shape, world) for shape, world, _ in keys} == {("7b", 64), ("7b", 8), ("1b", 8)}
    keys = chosen(parser().parse_args(["--shapes", "7b", "--worlds", "8", "--only", "ours:3,fsdp2"]))
    assert keys == [("7b", 8, "ours:3"), ("7b", 8, "fsdp2")]
    assert {name.partition(":")[0] for _, names in PLAN.values() for name in names} == {"ours", "fsdp2", "deepspeed"}


def test_each_contender_finds_its_own_deepspeed(tmp_path):
    inherited = os.pathsep.join([".", ".gpu-deps"]) if os.getcwd() == str(ROOT) else f"{ROOT}{os.pathsep}.gpu-deps"
    deps = os.path.abspath(".gpu-deps")
    ours, theirs, fsdp2 = (contender_of(name, str(tmp_path), inherited) for name in ("ours:3", "deepspeed:3", "fsdp2"))
    assert ours.variables["PYTHONPATH"].split(os.pathsep) == [str(ROOT), deps]
    assert theirs.variables["PYTHONPATH"].split(os.pathsep) == [str(tmp_path.resolve()), deps]
    assert fsdp2.variables["PYTHONPATH"].split(os.pathsep) == [deps]
    assert (fsdp2.environment, fsdp2.flavour, ours.flavour) == ("torch", "fsdp2", "3")


def test_the_table_compares_with_fsdp2_and_names_reasons():
    found = {
        ("7b", 64, "fsdp2"): [result(), result(1200.0)],
        ("7b", 64, "ours:3"): [result(2200.0, peak=5.0)],
        ("7b", 8, "ours:3"): [result(loss=float("nan"))],
        ("7b", 8, "deepspeed:3"): ["no --deepspeed-path"],
        ("7b", 8, "deepspeed:2"): [],
    }
    assert " 2.000 " in row(found, "ours:3")
    assert " 0.500 " in row(found, "ours:3")
    lines = table(found)
    assert "1,100" in lines[2]
    assert lines[4].endswith("loss is not finite")
    assert lines[5].endswith("-  no --deepspeed-path")
    assert lines[6].endswith("-  not run")


def test_a_failing_child_shows_its_output_and_fails_the_run(tmp_path, monkeypatch, capsys):
    file = tmp_path / "child.py"
    file.write_text("def measure(job):\n    print('a hint')\n    raise ValueError('it broke')\n")
    monkeypatch.setattr(gpu_scale, "CHILD", file)
    assert main(["--shapes", "1b", "--only", "ours:3,deepspeed:3"]) == 1
    shown = capsys.readouterr().out
    assert "a hint" in shown
    assert "ValueError: it broke" in shown
    assert "no --deepspeed-path" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("contender", "flavour", "reentrant"), [("ours", "3-block", True), ("torch", "fsdp2", False)])
@ranks(1, init=False, timeout=120.0)
def test_a_contender_is_measured(contender, flavour, reentrant):
    from transformers import LlamaForCausalLM

    SHAPES["tiny"] = (16, 2, 32, 2, 1, 32, 8, 1)  # bf16 is slow on many CPUs; only in this process
    with torch.device("meta"):
        model = LlamaForCausalLM(make_config("tiny"))
    assert sum(param.numel() for param in model.parameters()) == elements("tiny")
    assert sum(param.numel() for param in model.model.layers[0].parameters()) == scale_child.layer_elements("tiny")
    parameters = {"shape": "tiny", "world": 8, "device": "cpu", "steps": 1, "reentrant": reentrant}
    found = scale_child.measure(Job(contender, flavour, 0, 1, parameters, ""))
    assert set(found) == {measure.name for measure in MEASURES}
    assert found["collectives"] > 0
    assert 0 < found["loss"] < 20
