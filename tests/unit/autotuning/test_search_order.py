"""The candidates of a config, and the order in which they are run, against searches whose best is known."""

from __future__ import annotations

import argparse
import math

import pytest

from deepspeed.autotuning.autotuner import ExperimentRecord, page, summary
from deepspeed.autotuning.forecast import Forecast, StageForecast, Trace
from deepspeed.autotuning.scheduler import Ending, Outcome, TunedJob
from deepspeed.autotuning.space import SearchSpace
from deepspeed.autotuning.tuner import GridSearchTuner, ModelBasedTuner, RandomTuner
from deepspeed.autotuning.utils import get_val_by_key, set_val_by_key
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.runner import parse_args

LIST = "zero_optimization.reduce_bucket_size"


def job(*words, world=4, options=()):
    args = parse_args([*options, "train.py", "--deepspeed_config", "ds.json", *words])
    return TunedJob.of(args, 1, world)


def space(given, world=4, words=(), **keys):
    return SearchSpace(given, DeepSpeedAutotuningConfig(**keys), job(*words, world=world))


def batches(found):
    return sorted({(each.micro, each.steps) for each in found.candidates()})


def test_micro_batches_keep_the_batch_that_is_given():
    found = space({"train_batch_size": 48, "zero_optimization": {"stage": 2}})
    assert batches(found) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert found.baseline.name == "z2_gas1_tmbspg12"
    assert found.baseline.config({"train_batch_size": 48, "autotuning": {}}, 4) == {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 12,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
    }


def test_sizes_come_from_lists_limits_and_options_of_the_script():
    assert batches(space({"train_micro_batch_size_per_gpu": [3, 5], "gradient_accumulation_steps": [1, 2]})) == [
        (3, 1),
        (3, 2),
        (5, 1),
        (5, 2),
    ]
    mapped = {"train_micro_batch_size_per_gpu": "--bs", "gradient_accumulation_steps": "--gas"}
    auto = dict.fromkeys(mapped, "auto")
    found = space(auto, words=("--bs", "6", "--gas=3"), arg_mappings=mapped, max_train_batch_size=4 * 3 * 8, mp_size=1)
    assert batches(found) == [(1, 3), (2, 3), (4, 3), (6, 3), (8, 3)]
    assert found.baseline.micro == 6
    assert batches(space({}, mp_size=2, max_train_batch_size=4, min_train_batch_size=4)) == [(2, 1)]


def test_stages_and_lists_of_values():
    assert space({"zero_optimization": {"stage": "all"}}).stages == [0, 1, 2, 3]
    for least, section, device in (
        (1, "offload_optimizer", "cpu"),
        (1, "offload_optimizer", "nvme"),
        (3, "offload_param", "nvme"),
    ):
        assert space({"zero_optimization": {section: {"device": device}}}).stages == list(range(least, 4))
    paths = space({"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": ["/a", "/b"]}}})
    assert {each.name.rpartition("_")[2] for each in paths.candidates()} == {"path-%2Fa", "path-%2Fb"}, "names of files"
    given = {"zero_optimization": {"stage": [1, 3], "reduce_bucket_size": [10, 20]}}
    found = space(given, max_train_micro_batch_size_per_gpu=1)
    assert [(each.stage, dict(each.extras)) for each in found.candidates()] == [
        (stage, {LIST: size}) for stage in (1, 3) for size in (10, 20)
    ]
    slow = space({}, fast=False, max_train_micro_batch_size_per_gpu=1)
    whole = {dict(each.extras)[LIST] for each in slow.candidates()}
    assert {dict(each.extras)[LIST] for each in slow.candidates(10**6)} == {min(whole)}


@pytest.mark.parametrize(
    ("given", "keys", "said"),
    [
        ({"zero_optimization": {"stage": 7}}, {}, "zero_optimization.stage is 7"),
        ({}, {"mp_size": 3}, "autotuning.mp_size 3"),
        ({"train_batch_size": 6}, {}, "train_batch_size 6"),
        ({"zero_optimization": {"stage": [True]}}, {}, "zero_optimization.stage is"),
        ({LIST.split(".")[0]: {LIST.split(".")[1]: []}}, {}, "is an empty list"),
    ],
)
def test_what_cannot_be_searched_names_its_key(given, keys, said):
    with pytest.raises(DeepSpeedConfigError, match=said):
        _ = space(given, **keys).baseline


def test_the_job_is_the_same_but_for_its_config_and_mapped_options():
    found = job("--bs=2", "--x", "y", options=("--num_gpus", "2", "--autotuning", "tune", "--budget=3"))
    assert found.launcher == ("--num_gpus", "2")
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
    mappings = {"train_micro_batch_size_per_gpu": "--bs", "zero_optimization.stage": "--stage"}
    words = ["--num_gpus", "2", "train.py", "--deepspeed_config", "new", "--bs=8", "--x", "y", "--stage", "1"]
    assert found.command("new", config, mappings) == words
    plain = argparse.Namespace(launcher_words=[], user_script="s.py", user_args=["--deepspeed"], module=0, no_python=0)
    with pytest.raises(UsageError, match=r"no argument of s\.py names a config"):
        _ = TunedJob.of(plain, 1, 1).config


def test_values_by_key():
    config = {"a": {"size": 1}, "b": {"c": {"size": 2, "other": None}}}
    assert (get_val_by_key(config, "size"), get_val_by_key(config, "b.c.size")) == (1, 2)
    assert get_val_by_key(config, "absent") is get_val_by_key(config, "a.size.deeper") is None
    set_val_by_key(config, "size", 5)
    assert config == {"a": {"size": 5}, "b": {"c": {"size": 5, "other": None}}}


GIVEN = {"zero_optimization": {"stage": "all", "reduce_bucket_size": [1, 2, 3], "overlap_comm": [True, False]}}
LIMIT = 70.0


def seconds(candidate):
    """Of a step on a machine where stage 2, buckets of 2 and overlap are best, and 64 samples fit at stage 2."""
    extras = dict(candidate.extras)
    slower = (1.1, 1.05, 1.0, 1.3)[candidate.stage]
    slower *= {1: 1.15, 2: 1.0, 3: 1.08}[extras[LIST]] * (1.0 if extras["zero_optimization.overlap_comm"] else 1.1)
    return slower * (0.5 + 0.05 * candidate.micro)


def memory(candidate):
    return candidate.micro + (40, 20, 6, 2)[candidate.stage]


def forecast_of(found, wrong=1.0):
    """One that knows memory, and is wrong about the time of stages."""
    stages = {}
    for stage in found.stages:
        traces = [
            Trace(micro, micro + (40, 20, 6, 2)[stage], (0.5 + 0.05 * micro) * wrong**stage, 0.0, 1) for micro in (1, 8)
        ]
        stages[stage] = StageForecast(*traces)
    return Forecast(int(LIMIT), 10**9, stages)


def searched(kind, found, forecast, **keys):
    """Every candidate that was run, in order, and the best value."""
    config = DeepSpeedAutotuningConfig(**keys)
    order = kind(found.candidates(forecast.parameters), config, forecast, found.baseline)
    run, best = [], 0.0
    while (candidate := order.next()) is not None:
        run.append(candidate)
        if memory(candidate) > LIMIT:
            order.tell(candidate, Outcome(Ending.MEMORY, 1.0))
            continue
        took = seconds(candidate)
        metrics = {"latency": took * 1e3, "max_mem_per_gpu": memory(candidate)}
        order.tell(candidate, Outcome(Ending.MEASURED, 1.0, metrics))
        best = max(best, order.goodness(candidate, took))
    return run, best, order


@pytest.mark.parametrize("metric", ["throughput", "latency"])
@pytest.mark.parametrize("forecast", ["right", "wrong", "none"])
def test_the_best_of_a_grid_is_found_in_a_tenth_of_its_runs(metric, forecast):
    found = space(GIVEN, metric=metric)
    known = Forecast() if forecast == "none" else forecast_of(found, 1.0 if forecast == "right" else 1.2)
    grid = list(found.candidates())
    assert len(grid) == 4 * 11 * 3 * 2
    values = [(1 if metric == "latency" else each.samples) / seconds(each) for each in grid if memory(each) <= LIMIT]
    run, best, _ = searched(ModelBasedTuner, found, known, metric=metric)
    assert best >= 0.95 * max(values)
    assert len(run) <= len(grid) / 10
    assert len(set(run)) == len(run)


def test_what_cannot_fit_is_not_run():
    found = space(GIVEN)
    run, _, order = searched(
        GridSearchTuner, found, forecast_of(found), tuner_early_stopping=1000, tuner_num_trials=999
    )
    assert set(run) == {each for each in found.candidates() if memory(each) <= LIMIT}
    assert all("by the forecast" in why for why in order.pruned.values())
    assert len(run) + len(order.pruned) == 264
    # without a forecast a run that dies speaks for larger micro batches and lower stages
    run, _, order = searched(RandomTuner, found, Forecast(), tuner_early_stopping=1000, tuner_num_trials=999)
    died = [each for each in run if memory(each) > LIMIT]
    assert died
    for place, each in enumerate(run):
        assert not any(
            each.stage <= dead.stage and each.micro >= dead.micro for dead in run[:place] if memory(dead) > LIMIT
        )
    assert run == searched(RandomTuner, found, Forecast(), tuner_early_stopping=1000, tuner_num_trials=999)[0]


def test_a_search_ends_by_its_limits():
    found = space(GIVEN)
    run, _, _ = searched(GridSearchTuner, found, forecast_of(found), tuner_num_trials=2, tuner_early_stopping=99)
    assert [each.stage for each in run] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(searched(ModelBasedTuner, found, forecast_of(found), tuner_early_stopping=1)[0]) < 6
    refused = Forecast(refused={0: "no", 1: "no", 2: "no", 3: "no"})
    assert searched(GridSearchTuner, found, refused)[0] == [found.baseline]


def test_the_report_has_the_best_of_each_stage():
    found = space(GIVEN)
    some = [each for each in found.candidates() if each.micro == 4][::6]
    metrics = {"max_mem_per_gpu": 2**30}
    records = [
        ExperimentRecord(each, Outcome(Ending.MEASURED, 1.0, metrics), 10.0 - number)
        for number, each in enumerate(some)
    ]
    records.append(ExperimentRecord(found.baseline, Outcome(Ending.FAILED, 1.0, reason="<script>"), None))
    rows = [[cell.strip() for cell in line.split("|")] for line in summary(records, "throughput").splitlines()]
    assert rows[0] == ["tuning_space", "num_experiments", "best_metric_val", "best_exp_name"]
    assert [row[:3] for row in rows[1:]] == [
        ["z0", "2", "10"],
        ["z1", "1", "9"],
        ["z2", "1", "8"],
        ["z3", "1", "7"],
        ["global", "5", "10"],
    ]
    assert summary(records, "latency").splitlines()[-1].split("|")[2].strip() == "7"
    html = page(records, {some[0]: "needs > 1"}, "throughput")
    assert html.count("<circle") == 4
    assert "&lt;script&gt;" in html
    assert "needs &gt; 1" in html
    assert "<script" not in html
    assert math.isfinite(len(page([], {}, "latency")))
