"""What the five schedules take, and how a section of the config builds one."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from deepspeed.config.optimizer import SCHEDULER_PARAMS, SchedulerConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    get_torch_optimizer,
)
from tests.unit.runtime.scheduled import adam, lrs_of


class TestArguments:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (
                lambda: WarmupLR(adam(), warmup_num_steps=0),
                r"^warmup_num_steps is 0; it must be an integer of at least 1",
            ),
            (lambda: WarmupLR(adam(), warmup_num_steps=10.0), "^warmup_num_steps is 10.0"),
            (lambda: WarmupLR(adam(), warmup_num_steps=True), "^warmup_num_steps is True"),
            (lambda: WarmupLR(adam(), warmup_max_lr="auto"), "^warmup_max_lr is 'auto'; it must be a number"),
            (lambda: WarmupCosineLR(adam(), 10, warmup_num_steps=-1), "^warmup_num_steps is -1"),
            (lambda: WarmupCosineLR(adam(), "auto"), "^total_num_steps is 'auto'"),
            (lambda: WarmupDecayLR(adam(), float("nan")), "^total_num_steps is nan"),
            (lambda: LRRangeTest(adam(), lr_range_test_step_size=0), "^lr_range_test_step_size is 0"),
            (lambda: LRRangeTest(adam(), lr_range_test_step_size=2.5), "^lr_range_test_step_size is 2.5"),
            (lambda: OneCycle(adam(), 0, 1, cycle_first_step_size=0), "^cycle_first_step_size is 0; .* more than 0"),
            (lambda: OneCycle(adam(), 0, 1, cycle_second_step_size=-1), "^cycle_second_step_size is -1; .* at least 0"),
            (lambda: WarmupLR(adam(), warmup_min_lr=-1), "^warmup_min_lr is -1; it must be at least 0"),
            (lambda: WarmupLR(adam(), warmup_max_lr=[-1]), "^warmup_max_lr is -1"),
            (lambda: WarmupLR(adam(), last_batch_iteration=-2), "^last_batch_iteration is -2"),
            (lambda: WarmupDecayLR(adam(), 0), "^total_num_steps is 0; it must be more than 0"),
            (lambda: WarmupCosineLR(adam(), -5), "^total_num_steps is -5"),
            (lambda: WarmupCosineLR(adam(), 10, warmup_min_ratio=-1), "^warmup_min_ratio is -1"),
            (lambda: WarmupCosineLR(adam(), 10, cos_min_ratio=-1), "^cos_min_ratio is -1"),
            (lambda: LRRangeTest(adam(), lr_range_test_min_lr=-1), "^lr_range_test_min_lr is -1"),
            (lambda: LRRangeTest(adam(), lr_range_test_step_rate=-1), "^lr_range_test_step_rate is -1"),
            (lambda: OneCycle(adam(), -1, 1), "^cycle_min_lr is -1"),
            (lambda: OneCycle(adam(), 0, 1, decay_lr_rate=-1), "^decay_lr_rate is -1"),
            (lambda: OneCycle(adam(), 0, 1, decay_mom_rate=-1), "^decay_mom_rate is -1"),
            (lambda: OneCycle(adam(), 0, 1, cycle_min_mom=-1), "^cycle_min_mom is -1"),
            (lambda: OneCycle(adam(), 0, 1, cycle_max_mom=1), "^cycle_max_mom is 1, cycle_min_mom 0.8"),
            (lambda: OneCycle(adam(), 0, 1, cycle_first_stair_count="x"), "^cycle_first_stair_count is 'x'"),
            (lambda: OneCycle(adam(), 0, 1, cycle_second_stair_count=1.5), "^cycle_second_stair_count is 1.5"),
            (lambda: OneCycle(adam(), 0, 1, cycle_momentum="false"), "^cycle_momentum is 'false'; it must be true or"),
            (lambda: LRRangeTest(adam(), lr_range_test_staircase="no"), "^lr_range_test_staircase is 'no'; it must be"),
        ],
    )
    def test_wrong_values(self, build, message):
        with pytest.raises(ValueError, match=message):
            build()

    def test_an_unknown_warmup_warns_and_is_logarithmic(self, warnings_logged):
        optimizer = adam()
        WarmupLR(optimizer, warmup_num_steps=8, warmup_type="cubic").step(1)
        assert lrs_of(optimizer)[0] == pytest.approx(math.log(2) / math.log(8))
        assert any("'cubic' is unknown" in text for text in warnings_logged)

    @pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
    def test_a_warmup_longer_than_training_only_warns(self, kind, warnings_logged):
        kind(adam(), 10, warmup_num_steps=20)
        assert any("total_num_steps (10) is less than warmup_num_steps (20)" in text for text in warnings_logged)

    def test_wrapped_optimizers(self):
        inner = adam(1.0)
        wrapper = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))
        assert get_torch_optimizer(inner) is inner
        assert get_torch_optimizer(wrapper) is inner
        WarmupLR(wrapper)
        assert lrs_of(inner) == [0.0]

    def test_a_wrapper_that_only_has_groups(self):
        wrapper = SimpleNamespace(param_groups=[{"lr": 1.0}])
        WarmupLR(wrapper, warmup_num_steps=4, warmup_type="linear").step(2)
        assert wrapper.param_groups == [{"lr": 0.5}]

    def test_something_else_is_a_type_error(self):
        with pytest.raises(TypeError, match=r"a schedule got a object"):
            WarmupLR(object())

    def test_the_config_knows_the_constructors(self):
        kinds = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
        taken = {kind.__name__: frozenset(inspect.signature(kind).parameters) - {"optimizer"} for kind in kinds}
        assert taken == dict(SCHEDULER_PARAMS)
        assert sorted(taken) == sorted(VALID_LR_SCHEDULES)


class TestBuild:
    @pytest.mark.parametrize(
        ("kind", "params"),
        [
            ("WarmupLR", {"warmup_num_steps": 4}),
            ("WarmupDecayLR", {"total_num_steps": 9}),
            ("WarmupCosineLR", {"total_num_steps": 9}),
            ("LRRangeTest", {}),
            ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
        ],
    )
    def test_ours_by_name(self, kind, params):
        schedule = build_scheduler(SchedulerConfig(type=kind, params=params), adam())
        assert type(schedule) is getattr(lr_schedules, kind)

    def test_torch_by_name_on_a_wrapped_optimizer(self):
        optimizer = adam()
        wrapper = SimpleNamespace(optimizer=optimizer)
        schedule = build_scheduler(SchedulerConfig(type="StepLR", params={"step_size": 3}), wrapper)
        assert type(schedule) is torch.optim.lr_scheduler.StepLR
        assert schedule.optimizer is optimizer

    @pytest.mark.parametrize(
        ("kind", "params", "path"),
        [
            ("WarmupDecayLR", {}, "scheduler.params.total_num_steps"),
            ("WarmupCosineLR", {"warmup_num_steps": 3}, "scheduler.params.total_num_steps"),
            ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr"),
            ("StepLR", {}, "scheduler.params.step_size"),
            ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps"),
            ("StepLR", {"step_size": 3, "gama": 1}, "scheduler.params.gama"),
            ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps"),
            ("WarmupLR", {"warmup_min_lr": [0, 1]}, "scheduler.params.warmup_min_lr"),
            ("StepLR", {"step_size": 3, "optimizer": 1}, "scheduler.params.optimizer"),
            ("warmuplr", {}, "scheduler.type"),
            ("math", {}, "scheduler.type"),
            ("LambdaLR", {"lr_lambda": "x"}, "scheduler.params"),
        ],
    )
    def test_wrong_sections_name_the_key(self, kind, params, path):
        with pytest.raises(DeepSpeedConfigError) as caught:
            build_scheduler(SchedulerConfig(type=kind, params=params), adam())
        assert caught.value.path == path
        assert path in str(caught.value)

    def test_no_type(self):
        with pytest.raises(DeepSpeedConfigError, match=r"scheduler\.type: missing"):
            build_scheduler(SchedulerConfig(), adam())

    def test_the_section_is_not_changed(self):
        section = SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": [0.0]})
        build_scheduler(section, adam())
        assert section.params == {"warmup_min_lr": [0.0]}
