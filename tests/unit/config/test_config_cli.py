"""`python -m deepspeed.config`: check, explain, schema."""

from __future__ import annotations

import importlib.util
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
    assert main(["check", write({**GOOD, "nebula": {"enabled": True}})]) == 1
    assert "nebula: Nebula checkpoints: part of the package torch_nebula, which is" in capsys.readouterr().err
    assert main(["check", "nowhere.json"]) == 1


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
@pytest.mark.parametrize("size", [3, 16])
def test_check_knows_groups_that_do_not_fit(write, capsys, key, size):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, key: size}}
    assert main(["check", write(config), "--world-size", "8"]) == 1
    told = capsys.readouterr().err
    assert f"zero_optimization.{key}" in told
    assert "2, 4, 8" in told
    config["zero_optimization"][key] = 4
    assert main(["check", write(config), "--world-size", "8"]) == 0


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


def test_explain_names_the_modules_that_read_a_key(write, capsys):
    assert main(["explain", write(GOOD), "--json"]) == 0
    readers = {row["key"]: row["readers"] for row in json.loads(capsys.readouterr().out)}
    assert readers["csv_monitor.job_name"] == ["monitor.monitor"]
    assert "zero.states.tiles" in readers["zero_optimization.sub_group_size"]
    assert "precision.policy" in readers["fp16.enabled"], "by another name of the section"
    assert "fusion.build" in readers["fused_kernels.mlp"], "by its name as text"
    assert readers["train_batch_size"] == ["config.batch", "config.deepspeed_config"]
    assert readers["expert_parallel.expert_w1"] == [], "nothing reads them"
    modules = {module for found in readers.values() for module in found}
    assert [name for name in modules if importlib.util.find_spec(f"deepspeed.{name}") is None] == []


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


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: input should be greater than 0"),
        ({"gradient_predivide_factor": -1}, "gradient_predivide_factor"),
        ({"csv_monitor": {"enabled": True, "job_name": "../x"}}, "csv_monitor.job_name"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number above zero, or 0 for no clipping"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "lr is -1"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": -1}}}, "weight_decay is -1"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "SGD"),
        ({"optimizer": {"type": "Muon", "params": {"adam_lr": -1}}}, "Muon refused them"),
        ({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}, "zero_allow_untested_optimizer"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "scheduler.params.warmup_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -5}}}, "scheduler.params.warmup_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": -1}}}, "scheduler.params.warmup_max_lr"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}}, "total_num_steps is 0"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": -1}}}, "cycle_max_lr is -1"),
        ({"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1}}}, "scheduler.params: OneCycleLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 0}}}, "is 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 64}}, "fp16.min_loss_scale"),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "partition_activations"),
        ({"zero_optimization": {"round_robin_gradients": "auto"}}, "no client fills this key"),
        ({"data_parallel_size": 4}, "data_parallel_size is 4, but 2 ranks are data-parallel here"),
        ({"train_batch_size": 3}, "train_batch_size"),
        ({"strict": True, "qqqq": 1}, "qqqq: unknown key"),
        ({"strict": 1, "qqqq": 1}, "qqqq: unknown key"),
        ({"strict": "true", "qqqq": 1}, "qqqq: unknown key"),
        ({"strict": "perhaps"}, "strict: input should be a valid boolean"),
        ({"log_level": "LOUD"}, "log_level"),
    ],
)
def test_check_says_what_initialize_would_say(keys, said, write, capsys):
    assert main(["check", write({"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **keys}), "--world-size", "2"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("level", ["info", "INFO", "Info"])
def test_a_log_level_is_written_in_any_case(level, write):
    assert main(["check", write({"train_batch_size": 2, "log_level": level})]) == 0


def test_check_names_keys_that_have_no_effect(write, capsys):
    idle = {"pipeline": {"stages": 4, "seed_layers": False}, "compile": {"free_activation": True}}
    assert main(["check", write({"train_batch_size": 2, **idle})]) == 0
    out = capsys.readouterr().out
    assert "pipeline.stages: no effect: PipelineModule decides it, by its arguments" in out
    assert "compile.free_activation: no effect" in out
    assert "seed_layers" not in out, "a value that is the default asks for nothing"
    assert main(["explain", write({"train_batch_size": 2, **idle}), "--changed"]) == 0
    assert "note: pipeline.stages: no effect" in capsys.readouterr().err


def test_check_takes_the_ranks_that_the_sizes_speak_of(write):
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert main(["check", write(sizes)]) == 0
    assert main(["check", write(sizes), "--world-size", "8"]) == 0
    assert main(["check", write(sizes), "--world-size", "4"]) == 1
    assert main(["check", write({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4})]) == 1


def test_a_schema_that_cannot_be_written_is_said_in_a_line(tmp_path, capsys):
    target = tmp_path / "no" / "ds.schema.json"
    assert main(["schema", "--output", str(target)]) == 1
    assert f"--output {target} cannot be written: No such file or directory" in capsys.readouterr().err


def test_json_of_infinity_is_read_by_strict_readers(write, capsys):
    assert main(["explain", write({"train_batch_size": 8, "steps_per_print": float("inf")}), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert {row["key"]: row["value"] for row in rows}["steps_per_print"] == "Infinity"
