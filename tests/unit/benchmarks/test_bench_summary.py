"""Statistics, ratios and targets of the benchmark runner."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.case import Case, Measure, Setting, Target
from benchmarks.runner import CaseRun, SettingRun
from benchmarks.summary import figure, number, ratios, summarise, verdict

SAMPLES = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=20)


def test_figure_of_known_samples():
    found = figure([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (found.median, found.spread, found.low, found.high) == (3.0, 1.0, 1.0, 100.0)
    assert found.samples == (4.0, 1.0, 3.0, 2.0, 100.0)


def test_one_sample_has_no_spread():
    assert figure([2.5]).spread == 0.0


def test_no_sample_is_an_error():
    with pytest.raises(ValueError, match="at least one sample"):
        figure([])


@given(SAMPLES)
def test_figure_bounds(samples):
    found = figure(samples)
    assert found.low <= found.median <= found.high
    assert found.median == statistics.median(samples)
    assert -1e-6 <= found.spread <= (found.high - found.low) / 2 + 1e-6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.0123, "0.012"), (8.0, "8"), (-3.21, "-3.21")],
)
def test_numbers_as_a_person_writes_them(value, text):
    assert number(value) == text


def test_ratios_are_ours_over_theirs():
    figures = {"ours": figure([1.0]), "deepspeed": figure([4.0]), "torch": figure([0.5])}
    assert ratios(figures) == {"deepspeed": 0.25, "torch": 2.0}


def test_no_ratio_of_differences_within_the_noise():
    assert ratios({"ours": figure([1.0]), "torch": figure([-0.1])}) == {}
    assert ratios({"ours": figure([0.0]), "torch": figure([1.0])}) == {}
    assert ratios({"torch": figure([1.0])}) == {}


@pytest.mark.parametrize(
    ("better", "limit", "than", "ours", "met", "statement"),
    [
        ("lower", 0.3, None, 0.3, True, "≤ 0.30 s"),
        ("lower", 0.3, None, 0.31, False, "≤ 0.30 s"),
        ("lower", 1.02, "torch", 2.05, False, "≤ 1.02 × torch"),
        ("lower", 1.02, "torch", 2.03, True, "≤ 1.02 × torch"),
        ("higher", 1.0, "torch", 1.9, False, "≥ 1 × torch"),
        ("higher", 1.0, "torch", 2.0, True, "≥ 1 × torch"),
        ("lower", 1.0, "deepspeed", 1.0, None, "≤ 1 × deepspeed"),
    ],
)
def test_targets(better, limit, than, ours, met, statement):
    figures = {"ours": figure([ours]), "torch": figure([2.0])}
    found = verdict(Target(limit, than), Measure("x", "x", "s", better), figures)
    assert (found.met, found.statement) == (met, statement)


def test_a_target_without_ours_is_not_judged():
    assert verdict(Target(1.0), Measure("x", "x", "s"), {"torch": figure([0.1])}).met is None


def test_summary_leaves_out_failed_contenders_and_foreign_targets():
    measure = Measure("t", "time", "s", targets=(Target(1.0, ranks=2),))
    case = Case("c", "a case", "c.py", (measure,), ranks=(1, 2), parameters=({"stage": 3},))
    runs = []
    for setting in case.settings():
        run = SettingRun(setting)
        run.add("ours", {"t": 2.0})
        run.add("ours", {"t": 4.0})
        run.add("torch", {"t": 1.0})
        run.failures["torch"] = "died"
        runs.append(run)
    one, two = summarise(CaseRun(case, ["ours", "torch"], runs)).settings
    assert one.label == "1 rank, stage 3"
    assert one.rows[0].figures["ours"].median == 3.0
    assert "torch" not in one.rows[0].figures
    assert one.failures == {"torch": "died"}
    assert one.rows[0].verdicts == ()
    assert [found.met for found in two.rows[0].verdicts] == [False]


def test_settings_are_every_combination():
    case = Case("c", "t", "f", (), ranks=(1, 2), parameters=({"stage": 1}, {"stage": 3}))
    expected = [Setting(1, {"stage": 1}), Setting(2, {"stage": 1}), Setting(1, {"stage": 3}), Setting(2, {"stage": 3})]
    assert case.settings() == expected
