"""Any mutation of a valid config either loads or raises DeepSpeedConfigError, never anything else."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed import log as ds_logging
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import load
from deepspeed.config.schema import Schema
from deepspeed.config.shape import walk
from deepspeed.errors import DeepSpeedConfigError

VALID = [
    {"train_batch_size": 8},
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9},
    },
    {
        "train_batch_size": 16,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "leaf_module": {"names": ["a"]}},
        "tensorboard": {"enabled": True, "output_path": "runs"},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "flops_profiler": {"enabled": False, "top_modules": 3},
        "pipeline": {"stages": "auto"},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": True}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["a"], "partition_type": "row"}]}},
        "autotuning": {"enabled": False, "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4]},
    },
]

JUNK = [None, True, False, 0, -1, 1, 3.5, 1e30, float("inf"), float("nan"), "", "auto", "cpu", "x" * 300, [], [1, "a"]]
JUNK += [{}, {"a": {"b": 1}}, {"enabled": "yes"}, object(), (1, 2), b"bytes", {"type": []}, [[]], {"": 1}, 10**400, {1}]
NAMES = [*sorted({path.split(".")[-1] for path, _ in walk(Schema)}), "", " ", "_x", "stage.3", "a.b.c", "$schema"]


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setattr(ds_logging.logger, "warning", lambda *args: None)


def containers(config):
    """Every object and list inside a config, itself included."""
    found, stack = [], [config]
    while stack:
        here = stack.pop()
        if isinstance(here, (dict, list)):
            found.append(here)
            stack.extend(here.values() if isinstance(here, dict) else here)
    return found


def junk(rng: random.Random):
    return copy.deepcopy(rng.choice(JUNK))


def mutate(config, rng: random.Random):
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 4)):
        here = rng.choice(containers(config))
        if isinstance(here, list):
            here.insert(rng.randint(0, len(here)), junk(rng))
            continue
        name = rng.choice([*here, rng.choice(NAMES)]) if here else rng.choice(NAMES)
        action = rng.randrange(5)
        if action == 0:
            here.pop(name, None)
        elif action == 1 and name:
            cut = rng.randrange(len(name))
            here[name[:cut] + rng.choice("abx_1") + name[cut + 1 :]] = here.pop(name, junk(rng))
        elif action == 2:
            here[name] = copy.deepcopy(rng.choice(VALID))
        else:
            here[name] = junk(rng)
    return config


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_mutations(seed):
    rng = random.Random(seed)
    loaded = 0
    for _ in range(500):
        config = mutate(rng.choice(VALID), rng)
        for build in (DeepSpeedConfig, lambda source: load(source, partial=True)):
            try:
                build(config)
                loaded += 1
            except DeepSpeedConfigError:
                pass
    assert loaded > 20, "the mutations must leave some configs valid, or this test shows nothing"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), anything, max_size=6))
def test_any_json_object(config):
    with contextlib.suppress(DeepSpeedConfigError):
        DeepSpeedConfig(config)
