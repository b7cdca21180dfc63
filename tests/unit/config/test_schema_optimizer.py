"""The optimizer and scheduler sections and their tables of names."""

import pytest

from deepspeed.config.load import load
from deepspeed.config.optimizer import (
    ONE_BIT_OPTIMIZERS,
    OPTIMIZER_PARAMS,
    OPTIMIZER_TYPES,
    SCHEDULER_PARAMS,
    SCHEDULER_TYPES,
    OptimizerConfig,
    SchedulerConfig,
)
from deepspeed.errors import DeepSpeedConfigError


@pytest.mark.parametrize(("given", "name"), [("adamw", "AdamW"), ("ONEBITADAM", "OneBitAdam"), ("SGD", "SGD")])
def test_our_optimizers_have_one_spelling_and_torchs_keep_theirs(given, name):
    assert OptimizerConfig(type=given).type == name


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_params_without_a_type_are_not_dropped_silently(section):
    with pytest.raises(DeepSpeedConfigError, match="missing, although params are given") as caught:
        load({"train_batch_size": 1, section: {"params": {"lr": 1}}})
    assert caught.value.path == f"{section}.type"
    for made in (OptimizerConfig, SchedulerConfig):
        assert made().params == {}
        assert made(type="X", params=None).params == {}


def test_max_grad_norm_belongs_elsewhere():
    with pytest.raises(DeepSpeedConfigError, match="gradient_clipping"):
        load({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}})


def test_the_tables_cover_every_type():
    assert {name.lower() for name in OPTIMIZER_TYPES} == set(OPTIMIZER_PARAMS)
    assert SCHEDULER_TYPES == ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle")
    assert set(OPTIMIZER_TYPES) >= ONE_BIT_OPTIMIZERS
    for names in (*OPTIMIZER_PARAMS.values(), *SCHEDULER_PARAMS.values()):
        assert names is None or "max_grad_norm" not in names


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("adam", {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach", "bias_correction"}),
        ("muon", {"muon_lr", "adam_lr", "ns_method", "per_head_muon", "momentum"}),
        ("lamb", {"max_coeff", "min_coeff", "eps_inside_sqrt"}),
    ],
)
def test_optimizer_parameters(kind, names):
    assert OPTIMIZER_PARAMS[kind] >= {"lr", "weight_decay", *names}
