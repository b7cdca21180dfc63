"""The top level: scalar keys, presence of sections, immutability, JSON Schema, cost of the import."""

import json
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from deepspeed.config.features import unbuilt
from deepspeed.config.model import ConfigModel
from deepspeed.config.schema import Schema


def refused(**values):
    with pytest.raises(ValidationError) as caught:
        Schema(**values)
    return str(caught.value)


def models(model=Schema, seen=None):
    """Every model class below the top level, itself included."""
    seen = {} if seen is None else seen
    if model not in seen:
        seen[model] = None
        for value in (field.annotation for field in model.model_fields.values()):
            for part in parts(value):
                models(part, seen)
    return list(seen)


def parts(annotation):
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from parts(inner)


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_section_is_frozen_and_described(model):
    assert model.model_config["frozen"] is True
    assert model.__doc__
    name = next(iter(model.model_fields))
    instance = model.model_construct()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(instance, name, None)


def test_only_sections_of_missing_features_take_any_key():
    assert {model.__name__ for model in models() if model.model_config["extra"] != "forbid"} == {"Unbuilt"}


def test_defaults():
    config = Schema()
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    assert config.zero_force_ds_cpu_optimizer is True
    assert config.seq_parallel_communication_data_type == "fp32"
    assert config.train_batch_size is config.train_micro_batch_size_per_gpu is None
    assert config.model_fields_set == set()
    assert config.sparse_attention is None


@pytest.mark.parametrize(
    ("given", "kept"), [(math.inf, math.inf), (None, None), (10, 10), (1e13, 10**13), ("5", 5), ("inf", math.inf)]
)
def test_steps_per_print(given, kept):
    assert Schema(steps_per_print=given).steps_per_print == kept
    assert Schema(steps_per_print=10**13).steps_per_print == 10**13


@pytest.mark.parametrize("given", [0, -5, 1.5, math.nan, -math.inf, True, "often", [1], 0.5])
def test_steps_per_print_is_refused(given):
    assert "or null for never, found" in refused(steps_per_print=given)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_batch_sizes_are_whole_and_their_sign_is_judged_with_the_equation(key):
    assert getattr(Schema(**{key: 8.0}), key) == 8
    assert getattr(Schema(**{key: 0}), key) == 0
    for value in (True, 1.5, "many"):
        assert key in refused(**{key: value})


@pytest.mark.parametrize("key", ["communication_data_type", "seq_parallel_communication_data_type"])
def test_communication_dtypes(key):
    assert getattr(Schema(**{key: "FP16"}), key) == "fp16"
    assert getattr(Schema(**{key: "bfloat16"}), key) == "bf16"
    assert getattr(Schema(**{key: None}), key) is None
    assert "is not a supported dtype" in refused(**{key: "fp64"})


def test_other_scalars():
    assert Schema(gradient_allreduce_op="SUM").gradient_allreduce_op == "sum"
    assert "'mean' or 'sum'" in refused(gradient_allreduce_op="max")
    assert Schema(gradient_clipping=0).gradient_clipping == 0
    assert Schema(gradient_clipping=math.inf).gradient_clipping == math.inf
    for value in (math.nan, True, "auto"):
        assert "gradient_clipping" in refused(gradient_clipping=value)
    assert "log level 'loud' is unknown; use one of debug, info, " in refused(log_level="loud")
    assert Schema(log_level="ERROR").log_level == "ERROR"
    assert Schema(wall_clock_breakdown="true").wall_clock_breakdown is True
    assert "sequence_parallel_size" in refused(sequence_parallel_size=0)
    assert Schema(disable_allgather=True, allgather_size=5e8).allgather_size == 500_000_000


@pytest.mark.parametrize(("given", "kept"), [(None, None), (False, None), (True, {}), ({}, {}), ({"a": 1}, {"a": 1})])
def test_datastates_is_off_unless_asked_for(given, kept):
    assert Schema(datastates_ckpt=given).datastates_ckpt == kept


def test_datastates_is_no_number():
    assert "expected true, false or an object" in refused(datastates_ckpt=3)


def test_of_what_is_foreign_only_the_switch_is_known():
    schema = Schema(amp={"enabled": False, "opt_level": "O1"}, nebula={"any": 1}, datastates_ckpt={"any": 1})
    assert schema.amp.model_extra == {"opt_level": "O1"}
    assert [problem.path for problem in unbuilt(schema)] == ["datastates_ckpt"]
    assert "amp.enabled" in refused(amp={"enabled": "perhaps"})


def test_both_precisions_present_and_off():
    config = Schema(fp16={"enabled": False, "auto_cast": True}, bf16={"enabled": False})
    assert not config.fp16.enabled
    assert not config.bf16.enabled


def test_unknown_keys_are_refused_by_the_models():
    assert "Extra inputs" in refused(zero_optimizaton={})


def test_the_parts_that_scripts_read_together():
    config = Schema(wandb={"enabled": True}, comms_logger={"enabled": True})
    assert config.monitor_config.enabled
    assert config.monitor_config.wandb is config.wandb
    assert config.comms_config.comms_logger_enabled


def test_defaults_are_not_shared_between_configs():
    first = Schema()
    first.optimizer.params["lr"] = 1
    first.elasticity.micro_batch_sizes.append(99)
    assert Schema().optimizer.params == {}
    assert Schema().elasticity.micro_batch_sizes == [2, 4, 6]


def test_json_schema():
    schema = Schema.model_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == set(Schema.model_fields)
    zero = schema["$defs"]["DeepSpeedZeroConfig"]["properties"]
    assert zero["stage3_prefetch_bucket_size"]["default"] == 50_000_000
    assert all("description" in value for value in zero.values())


MEASURE = """
import sys, types
for name, path in (("deepspeed", "deepspeed"), ("deepspeed.config", "deepspeed/config")):
    package = types.ModuleType(name)  # the package's own __init__ is not what is measured here
    package.__path__ = [path]
    sys.modules[name] = package
import deepspeed.config.model
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
from deepspeed.config.features import unbuilt
from deepspeed.config.schema import Schema
sys.setprofile(None)
print(calls, "torch" in sys.modules)
"""


def test_the_import_is_cheap_and_free_of_torch(pytestconfig):
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True)
    calls, torch = done.stdout.split()
    assert torch == "False"
    assert int(calls) < 300_000, "a call costs about a microsecond, whatever else the machine does"
