"""`python -m deepspeed.config`: check, explain, schema."""

from __future__ import annotations

import json

import pytest

from deepspeed.config.__main__ import main

GOOD = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "bfloat16": {"enabled": True},
    "zero_optimization": {"stage": 3, "max_live_parameters": 5},
}


@pytest.fixture
def write(tmp_path):
    def file(config):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        return str(path)

    return file


def test_check_says_valid(write, capsys):
    assert main(["check", write(GOOD), "--world-size", "2"]) == 0
    assert capsys.readouterr().out.endswith("ds.json: valid\n")


def test_check_tells_what_is_wrong(write, capsys):
    assert main(["check", write({"train_batch_size": 8, "zero_optimizaton": {}})]) == 1
    assert "zero_optimizaton: unknown key; did you mean 'zero_optimization'?" in capsys.readouterr().err
    assert main(["check", write(GOOD), "--world-size", "3"]) == 1
    assert "not divisible by" in capsys.readouterr().err
    assert main(["check", write({**GOOD, "hybrid_engine": {"enabled": True}})]) == 1
    assert "not part of this version" in capsys.readouterr().err
    assert main(["check", "nowhere.json"]) == 1


def test_check_lists_what_a_client_must_fill(write, capsys):
    assert main(["check", write({"train_batch_size": "auto"})]) == 0
    assert 'train_batch_size: left at "auto"' in capsys.readouterr().out


def test_explain_gives_every_origin(write, capsys):
    assert main(["explain", write(GOOD), "--world-size", "2", "--json"]) == 0
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["train_batch_size"] == (8, "given")
    assert rows["gradient_accumulation_steps"] == (2, "derived")
    assert rows["gradient_clipping"] == (1.0, "default")
    assert rows["bf16.enabled"] == (True, "renamed from bfloat16")
    assert rows["zero_optimization.stage3_max_live_parameters"] == (5, "given as zero_optimization.max_live_parameters")
    assert rows["zero_optimization.overlap_comm"] == (True, "derived: null is yes")
    assert rows["communication_data_type"] == ("bf16", "derived from the precision")


def test_explain_as_a_table(write, capsys):
    assert main(["explain", write(GOOD), "--changed"]) == 0
    out = capsys.readouterr().out
    assert "on 1 data-parallel rank" in out
    assert "zero_optimization.stage " in out
    assert "gradient_clipping" not in out


def test_the_schema_is_one_that_editors_can_use(tmp_path):
    target = tmp_path / "ds.schema.json"
    assert main(["schema", "--output", str(target)]) == 0
    schema = json.loads(target.read_text())
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "zero_optimization" in schema["properties"]
    zero = schema["$defs"]["DeepSpeedZeroConfig"]["properties"]
    assert "stage3_prefetch_bucket_size" in zero
    assert zero["stage3_prefetch_bucket_size"]["description"]
    assert {"const": "auto", "description": "filled in by Transformers' Trainer or by Accelerate"} in zero[
        "reduce_bucket_size"
    ]["anyOf"]


def test_a_wrong_command_line_is_status_2():
    with pytest.raises(SystemExit) as caught:
        main(["frobnicate"])
    assert caught.value.code == 2
