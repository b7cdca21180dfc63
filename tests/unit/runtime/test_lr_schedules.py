"""The five schedules against formulas written down a second time: curves, states, groups, momenta."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    update_lr,
)
from tests.unit.runtime.scheduled import adam, lrs_of

rates = st.floats(0, 1, allow_nan=False)
sizes = st.integers(1, 30)
steady = settings(deadline=None)


def sgd(lr=1.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def trajectory(schedule, optimizer, steps):
    """The first group's learning rate at k = −1, 0, 1, …"""
    values = [lrs_of(optimizer)[0]]
    for _ in range(steps):
        schedule.step()
        values.append(lrs_of(optimizer)[0])
    return values


MAKERS = {
    "WarmupLR": lambda o: WarmupLR(o, 0.1, 0.9, 5),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 20, 0.1, 0.9, 5, "linear"),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 20, 0.2, 5),
    "LRRangeTest": lambda o: LRRangeTest(o, 0.1, 3, 0.5),
    "OneCycle": lambda o: OneCycle(o, 0.1, 1.0, 0.3, 4, 6, decay_step_size=2, decay_mom_rate=0.01),
}


class TestPublishedSamples:
    """Sequences that were seen from the original."""

    def test_warmup(self):
        optimizer = adam(1.0)
        schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
        assert trajectory(schedule, optimizer, 6) == [0, 0, 0.25, 0.5, 0.75, 1, 1]

    def test_cosine(self):
        optimizer = adam(1.0)
        schedule = WarmupCosineLR(optimizer, 10, 0.2, 4, 0.1, "linear")
        expected = [0, 0.2, 0.4, 0.6, 0.8, 0.9397, 0.775, 0.55, 0.325, 0.1603, 0.1, 0.1]
        assert trajectory(schedule, optimizer, 11) == pytest.approx(expected, abs=5e-5)

    def test_decay_as_a_trainer_logs_it_after_each_step(self):
        optimizer = adam(1.0)
        schedule = WarmupDecayLR(optimizer, 6, 0, 5e-3, 2, "linear")
        logged = []
        for _ in range(6):
            schedule.step()
            logged.append(schedule.get_last_lr()[0])
        assert logged == pytest.approx([0, 0.0025, 0.005, 0.00375, 0.0025, 0.00125])

    def test_range_test_staircase(self):
        optimizer = adam()
        schedule = LRRangeTest(optimizer, 0.1, 2, 1.0, True)
        assert trajectory(schedule, optimizer, 6) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4])

    def test_one_cycle(self):
        optimizer = adam()
        schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=4)
        assert trajectory(schedule, optimizer, 9) == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]

    def test_one_cycle_with_stairs(self):
        optimizer = adam()
        schedule = OneCycle(optimizer, 0.0, 1.0, 0, 4, 6, 2, 3)
        expected = [0, 0, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0, 0]
        assert trajectory(schedule, optimizer, 11) == pytest.approx(expected)

    def test_one_cycle_without_a_second_half_falls_at_once(self):
        optimizer = adam()
        schedule = OneCycle(optimizer, 0.0, 1.0, 0, 4, 0)
        assert trajectory(schedule, optimizer, 6) == [0, 0.25, 0.5, 0.75, 0, 0, 0]


class TestCurves:
    """Every value at every k, by formulas written from the specification."""

    @staticmethod
    def ramp(k, n, kind):
        n = max(2, n)
        return {"log": math.log(k + 1, n), "linear": k / n}[kind]

    @steady
    @given(rates, rates, sizes, st.sampled_from(["log", "linear"]), st.integers(-1, 80))
    def test_warmup(self, low, high, n, kind, k):
        optimizer = adam(0.5)
        schedule = WarmupLR(optimizer, low, high, n, kind)
        schedule.step(k)
        share = 0 if k < 0 else 1 if k >= max(2, n) else self.ramp(k, n, kind)
        assert lrs_of(optimizer)[0] == pytest.approx((1 - share) * low + share * high, abs=1e-12)

    @steady
    @given(rates, rates, sizes, sizes, st.sampled_from(["log", "linear"]), st.integers(-1, 80))
    def test_decay(self, low, high, n, total, kind, k):
        optimizer = adam(0.5)
        schedule = WarmupDecayLR(optimizer, total, low, high, n, kind)
        schedule.step(k)
        n_used = max(2, n)
        if k < 0:
            share = 0
        elif k < n_used:
            share = self.ramp(k, n, kind)
        elif total - n_used >= 1:
            share = max(0, 1 - (k - n_used) / (total - n_used))
        else:
            share = max(0, total - k)
        assert lrs_of(optimizer)[0] == pytest.approx((1 - share) * low + share * high, abs=1e-12)

    @steady
    @given(rates, rates, rates, sizes, sizes, st.sampled_from(["log", "linear"]), st.integers(-1, 80))
    def test_cosine(self, lr, r0, floor, n, total, kind, k):
        optimizer = adam(lr)
        schedule = WarmupCosineLR(optimizer, total, r0, n, floor, kind)
        schedule.step(k)
        n_used = max(2, n)
        if k < 0:
            ratio = 0
        elif k < n_used:
            ratio = r0 + (1 - r0) * self.ramp(k, n, kind)
        else:
            p = (k - n_used + 1) / (total - n_used if total > n_used else 1)
            ratio = floor + (1 - floor) * math.cos(math.pi * min(p, 1) / 2) ** 2
        assert schedule.get_lr_ratio() == pytest.approx(ratio, abs=1e-9)
        assert lrs_of(optimizer)[0] == pytest.approx(lr * ratio, abs=1e-9)

    @steady
    @given(rates, sizes, rates, st.booleans(), st.integers(-1, 80))
    def test_range(self, low, size, rate, staircase, k):
        optimizer = adam()
        schedule = LRRangeTest(optimizer, low, size, rate, staircase)
        schedule.step(k)
        intervals = sum(1 for b in range(1, k + 2) if b % size == 0) if staircase else (k + 1) / size
        assert lrs_of(optimizer)[0] == pytest.approx(low + low * rate * intervals, abs=1e-12)

    @steady
    @given(
        rates, rates, rates, sizes, st.none() | st.integers(0, 30), st.integers(0, 5), st.none() | st.integers(0, 5),
        st.integers(0, 9), st.integers(-1, 90),
    )  # fmt: skip
    def test_cycle(self, low, high, rate, first, second, stairs, second_stairs, decay, k):
        optimizer = adam()
        schedule = OneCycle(optimizer, low, high, rate, first, second, stairs, second_stairs, decay)
        schedule.step(k)
        second = first if second is None else second
        second_stairs = stairs if second_stairs is None else second_stairs
        total, b = first + second, k + 1
        if k >= total:
            expected = low / (1 + rate * (b - total) / decay) if decay else low
            mom = 0.9
        else:
            if b == total:
                s = 0.0
            elif b <= first:
                s = math.floor(b * stairs / first) / stairs if stairs else b / first
            else:
                left = total - b
                s = math.floor(left * second_stairs / second) / second_stairs if second_stairs else left / second
            expected = low + (high - low) * s
            mom = 0.9 - 0.1 * s
        assert lrs_of(optimizer)[0] == pytest.approx(expected, abs=1e-12)
        assert optimizer.param_groups[0]["betas"] == (pytest.approx(mom), 0.999)


class TestState:
    @pytest.mark.parametrize("kind", MAKERS)
    def test_nothing_but_the_position(self, kind):
        schedule = MAKERS[kind](adam())
        assert schedule.state_dict() == {"last_batch_iteration": -1}
        schedule.step()
        assert schedule.state_dict() == {"last_batch_iteration": 0}

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("saved_at", [0, 1, 4, 13])
    def test_resuming_equals_not_having_stopped(self, kind, saved_at):
        whole, resumed = adam(1.0, 0.5), adam(1.0, 0.5)
        first = MAKERS[kind](whole)
        for _ in range(saved_at):
            first.step()
        second = MAKERS[kind](resumed)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for _ in range(10):
            assert [(g["lr"], g["betas"]) for g in whole.param_groups] == [
                (g["lr"], g["betas"]) for g in resumed.param_groups
            ]
            assert first.get_last_lr() == second.get_last_lr() == second.get_lr() == lrs_of(resumed)
            first.step()
            second.step()

    @pytest.mark.parametrize("kind", MAKERS)
    def test_built_at_a_position_is_stepped_to_it(self, kind):
        stepped, built = adam(), adam()
        schedule = MAKERS[kind](stepped)
        for _ in range(8):
            schedule.step()
        twin = MAKERS[kind](adam())
        arguments = {
            "WarmupLR": (WarmupLR, 0.1, 0.9, 5),
            "WarmupDecayLR": (WarmupDecayLR, 20, 0.1, 0.9, 5, "linear"),
            "WarmupCosineLR": (WarmupCosineLR, 20, 0.2, 5),
            "LRRangeTest": (LRRangeTest, 0.1, 3, 0.5),
            "OneCycle": (OneCycle, 0.1, 1.0, 0.3, 4, 6),
        }[kind]
        options = {"decay_step_size": 2, "decay_mom_rate": 0.01} if kind == "OneCycle" else {}
        arguments[0](built, *arguments[1:], **options, last_batch_iteration=7)
        assert lrs_of(built) == lrs_of(stepped)
        twin.step(7)
        assert twin.get_last_lr() == lrs_of(stepped)

    def test_a_foreign_state_is_refused(self):
        torch_state = torch.optim.lr_scheduler.StepLR(adam(), 3).state_dict()
        with pytest.raises(ValueError, match=r"needs last_batch_iteration"):
            WarmupLR(adam()).load_state_dict(torch_state)

    @pytest.mark.parametrize("kind", MAKERS)
    def test_the_learning_rate_is_known_before_the_first_step(self, kind):
        optimizer = adam(1.0, 2.0)
        schedule = MAKERS[kind](optimizer)
        assert schedule.get_last_lr() == schedule.get_lr() == lrs_of(optimizer)
        assert len(schedule.get_last_lr()) == 2


class TestGroups:
    def test_without_a_maximum_each_group_has_its_own(self):
        optimizer = adam(1.0, 0.5)
        WarmupLR(optimizer, warmup_num_steps=4).step(4)
        assert lrs_of(optimizer) == [1.0, 0.5]

    def test_the_decay_has_a_maximum_of_its_own(self):
        optimizer = adam(1.0)
        WarmupDecayLR(optimizer, 10, warmup_num_steps=4).step(4)
        assert lrs_of(optimizer) == [0.001]

    def test_cosine_scales_each_group(self):
        optimizer = adam(1.0, 0.5)
        schedule = WarmupCosineLR(optimizer, 10, 0.2, 4, 0.1, "linear")
        schedule.step(1)
        assert lrs_of(optimizer) == pytest.approx([0.4, 0.2])

    @pytest.mark.parametrize("sequence", [list, tuple])
    def test_bounds_may_be_given_per_group(self, sequence):
        optimizer = adam(1, 1)
        schedule = WarmupLR(optimizer, sequence((0.0, 0.5)), sequence((1.0, 2.0)), 4, "linear")
        assert lrs_of(optimizer) == [0.0, 0.5]
        schedule.step(4)
        assert lrs_of(optimizer) == [1.0, 2.0]
        LRRangeTest(optimizer, sequence((0.1, 0.2)))
        assert lrs_of(optimizer) == [0.1, 0.2]
        OneCycle(optimizer, sequence((0.3, 0.4)), 1.0, cycle_max_mom=sequence((0.7, 0.95)))
        assert lrs_of(optimizer) == [0.3, 0.4]
        assert [group["betas"][0] for group in optimizer.param_groups] == [0.7, 0.95]

    @pytest.mark.parametrize(
        ("build", "name"),
        [
            (lambda o: WarmupLR(o, [0.0]), "warmup_min_lr"),
            (lambda o: WarmupLR(o, 0, [1.0]), "warmup_max_lr"),
            (lambda o: WarmupDecayLR(o, 9, 0, [1.0, 2.0, 3.0]), "warmup_max_lr"),
            (lambda o: LRRangeTest(o, [0.0]), "lr_range_test_min_lr"),
            (lambda o: OneCycle(o, [0.0], 1.0), "cycle_min_lr"),
            (lambda o: OneCycle(o, 0.0, [1.0]), "cycle_max_lr"),
            (lambda o: OneCycle(o, 0.0, 1.0, cycle_min_mom=[1.0]), "cycle_min_mom"),
        ],
    )
    def test_a_list_of_another_length(self, build, name):
        with pytest.raises(ValueError, match=rf"^{name} has \d values and the optimizer has 2 parameter groups"):
            build(adam(1, 1))

    def test_a_tensor_learning_rate_keeps_its_identity(self):
        rate = torch.tensor(1.0)
        optimizer = adam(rate)
        schedule = WarmupCosineLR(optimizer, 10, 0.2, 4, 0.1, "linear")
        schedule.step(1)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.4)
        assert schedule.get_last_lr() == pytest.approx([0.4])

    def test_update_lr_returns_what_it_wrote(self):
        optimizer = adam(1, 1)
        assert update_lr(optimizer.param_groups, [3, 4]) == [3, 4]
        assert lrs_of(optimizer) == [3, 4]


class TestMomentum:
    def test_runs_against_the_learning_rate_and_starts_at_its_maximum(self):
        optimizer = adam(betas=(0.5, 0.95))
        schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=2)
        seen = [optimizer.param_groups[0]["betas"]]
        for _ in range(5):
            schedule.step()
            seen.append(optimizer.param_groups[0]["betas"])
        assert [beta1 for beta1, _ in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9])
        assert {beta2 for _, beta2 in seen} == {0.95}, "the optimizer's own beta2 stays"
        assert schedule.get_mom() == [seen[-1]]

    def test_decay_grows_but_stays_below_one(self):
        optimizer = adam()
        schedule = OneCycle(optimizer, 0.0, 1.0, 0, 2, decay_step_size=2, decay_mom_rate=0.1)
        schedule.step(4)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(0.9 * 1.05)
        schedule.step(1000)
        assert optimizer.param_groups[0]["betas"][0] == 0.999

    def test_off(self):
        optimizer = adam(betas=(0.5, 0.95))
        schedule = OneCycle(optimizer, 0.0, 1.0, cycle_momentum=False)
        schedule.step()
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.95)
        assert schedule.get_mom() is None

    def test_an_optimizer_without_betas_is_left_alone_with_a_warning(self, warnings_logged):
        optimizer = sgd()
        schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=2)
        schedule.step()
        assert lrs_of(optimizer) == [0.5]
        assert schedule.get_mom() is None
        assert any("no betas" in text for text in warnings_logged)
