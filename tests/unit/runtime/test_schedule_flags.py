"""The flags of scripts that tune a schedule, and what is read from them."""

from __future__ import annotations

import argparse
import sys

import pytest

from deepspeed.config.optimizer import SchedulerConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    add_tuning_arguments,
    build_scheduler,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from tests.unit.runtime.scheduled import adam


class TestCommandLine:
    @staticmethod
    def parse(*arguments):
        parser = argparse.ArgumentParser()
        assert add_tuning_arguments(parser) is parser
        return parser.parse_args(arguments)

    def test_defaults(self):
        assert vars(self.parse()) == {
            "lr_schedule": None,
            "lr_range_test_min_lr": 0.001,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_step_size": 1000,
            "lr_range_test_staircase": False,
            "cycle_first_step_size": 1000,
            "cycle_first_stair_count": -1,
            "cycle_second_step_size": -1,
            "cycle_second_stair_count": -1,
            "decay_step_size": 1000,
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "decay_lr_rate": 0.0,
            "cycle_momentum": None,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 1000,
            "warmup_type": "log",
            "warmup_min_ratio": 0.01,
            "cos_min_ratio": 0.01,
            "total_num_steps": None,
        }

    @pytest.mark.parametrize("kind", VALID_LR_SCHEDULES)
    def test_every_schedule_can_be_built_from_the_command_line_alone(self, kind):
        config, problem = get_config_from_args(self.parse("--lr_schedule", kind, "--total_num_steps", "5000"))
        assert problem is None
        schedule = build_scheduler(SchedulerConfig(**config), adam())
        assert type(schedule).__name__ == kind

    def test_every_flag_reaches_its_schedule(self):
        arguments = self.parse("--lr_schedule", "OneCycle", "--no-cycle_momentum", "--cycle_second_step_size", "7")
        config, _ = get_config_from_args(arguments)
        assert config["params"]["cycle_momentum"] is False
        assert config["params"]["cycle_second_step_size"] == 7
        assert "cycle_first_stair_count" not in config["params"], "negative: not given"
        arguments = self.parse("--lr_schedule", "LRRangeTest", "--lr_range_test_staircase", "true")
        assert get_config_from_args(arguments)[0]["params"]["lr_range_test_staircase"] is True
        arguments = self.parse("--lr_schedule", "LRRangeTest", "--lr_range_test_staircase", "False")
        assert get_config_from_args(arguments)[0]["params"]["lr_range_test_staircase"] is False

    def test_a_flag_that_is_no_truth_value(self, capsys):
        with pytest.raises(SystemExit):
            self.parse("--lr_range_test_staircase", "maybe")
        assert "neither true nor false" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (argparse.Namespace(), "--lr_schedule not specified"),
            (argparse.Namespace(lr_schedule=None), "--lr_schedule not specified"),
            (argparse.Namespace(lr_schedule="Cosine"), "Cosine is not a supported LR schedule"),
        ],
    )
    def test_no_section(self, arguments, message):
        config, problem = get_config_from_args(arguments)
        assert config is None
        assert message in problem

    def test_override_all(self):
        params = {"warmup_num_steps": 3, "other": 1}
        override_params(self.parse("--warmup_num_steps", "9"), params)
        assert params["warmup_num_steps"] == 9
        assert params["other"] == 1
        assert {"cycle_max_lr", "lr_range_test_min_lr", "cos_min_ratio"} <= set(params)

    @pytest.mark.parametrize(
        ("function", "names"),
        [
            ("override_lr_range_test_params", {"lr_range_test_min_lr"}),
            ("override_1cycle_params", {"cycle_min_lr", "decay_mom_rate"}),
            ("override_warmupLR_params", {"warmup_min_lr", "warmup_type"}),
            ("override_warmupCosineLR_params", {"warmup_min_ratio", "cos_min_ratio", "warmup_num_steps"}),
        ],
    )
    def test_override_one(self, function, names):
        params = {}
        getattr(lr_schedules, function)(self.parse(), params)
        assert names <= set(params)

    def test_parse_arguments_leaves_the_rest(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr_schedule", "WarmupLR", "--epochs", "3"])
        arguments, rest = parse_arguments()
        assert arguments.lr_schedule == "WarmupLR"
        assert rest == ["--epochs", "3"]

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.2}}, 0.2),
            ({"type": "LRRangeTest", "params": {}}, 0.001),
            ({"type": "OneCycle", "params": {"cycle_max_lr": 0.3}}, 0.3),
            ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.4}}, 0.4),
            ({"type": "WarmupDecayLR", "params": {}}, 0.001),
        ],
    )
    def test_lr_from_config(self, config, expected):
        assert get_lr_from_config(config) == (expected, "")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "type not defined"),
            ({"type": "WarmupLR"}, "params not defined"),
            ({"type": "StepLR", "params": {}}, "StepLR is not a valid LR schedule"),
            ({"type": "WarmupLR", "params": {}}, "no warmup_max_lr"),
            ({"type": "WarmupCosineLR", "params": {}}, "multiplies the optimizer's own"),
        ],
    )
    def test_no_lr_in_config(self, config, message):
        rate, problem = get_lr_from_config(config)
        assert rate is None
        assert message in problem
