"""What people do at 2 a.m. and what they are told: nothing is silently wrong, on one rank, on two, at every stage."""

from __future__ import annotations

import copy
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm import failure
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError
from tests.harness import ranks, shared_ranks
from tests.told import Told

STAGES = [0, 1, 2, 3]
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def build(stage, *, optimizer=ADAMW, model=None, model_parameters=None, **keys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)) if model is None else model
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **({"optimizer": optimizer} if optimizer else {}),
        **keys,
    }
    return deepspeed.initialize(model=model, config=config, model_parameters=model_parameters)[0]


def train(engine, factor=1.0):
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean() * factor)
    engine.step()


def whole(engine):
    values = engine.module_state_dict()
    return {name: value.clone() for name, value in values.items()}


@shared_ranks(1)
def test_inputs_of_another_dtype():
    for keys, given in (({"bf16": {"enabled": True}}, torch.float32), ({}, torch.float64)):
        engine = build(1, **keys)
        hint = f"the model computes in {'bf16' if keys else 'fp32'}: cast inputs, which are"
        for call in (engine, engine.eval(), torch.no_grad()(engine)):
            with pytest.raises(RuntimeError, match=hint) as caught:
                call({"x": torch.ones(2, 8, dtype=given)}["x"])
            assert str(caught.value).count("cast inputs") == 1
        with pytest.raises(RuntimeError) as caught:
            engine(torch.ones(2, 8, dtype=torch.long))  # no cast makes an embedding of it
        assert "cast inputs" not in str(caught.value)
        engine.destroy()


def said(lines, *words):
    return any(all(word in line for word in words) for line in lines)


# ---- gradients that are no numbers


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(2)
def test_nan_gradients_are_skipped_and_told(stage, precision):
    keys = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    engine = build(stage, **keys)
    train(engine)
    before = whole(engine)
    with Told() as lines:
        train(engine, factor=float("nan") if dist.get_rank() else 1.0)
        train(engine, factor=float("inf"))
    assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (2, 3, False)
    torch.testing.assert_close(whole(engine), before, rtol=0, atol=0)
    if dist.get_rank() == 0:
        assert said(lines, "step 2 skipped", "inf or NaN", "nonfinite_gradients")
        assert said(lines, "step 3 skipped", "2 steps in a row")
        assert not said(lines, "loss scale")
    train(engine)
    assert engine.was_step_applied()
    assert all(bool(value.isfinite().all()) for value in whole(engine).values())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2])
def test_nan_gradients_stop_where_asked(stage, size):
    ranks(size)(_stops)(stage=stage)


def _stops(stage):
    engine = build(stage, nonfinite_gradients="stop")
    train(engine)
    before = whole(engine)
    with pytest.raises(DeepSpeedError, match=r"nonfinite_gradients is 'stop'.*nan"):
        train(engine, factor=float("nan"))
    torch.testing.assert_close(whole(engine), before, rtol=0, atol=0)
    train(engine)


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_nan_gradients_are_taken_where_asked(stage):
    engine = build(stage, nonfinite_gradients="ignore")
    with Told() as lines:
        train(engine, factor=float("nan") if dist.get_rank() else 1.0)
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert not said(lines, "skipped")
    assert all(bool(value.isnan().all()) for value in whole(engine).values())
    assert math.isnan(engine.get_global_grad_norm())


# ---- another optimizer, another learning rate

OTHERS = {
    "SGD": {"type": "SGD", "params": {"lr": 0.1}},
    "SGD with momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-4}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.1}},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("way", ["into", "from"])
@shared_ranks(2)
def test_resuming_with_another_optimizer(stage, other, way, tmp_path):
    one, two = (ADAMW, OTHERS[other]) if way == "into" else (OTHERS[other], ADAMW)
    engine = build(stage, optimizer=one)
    train(engine)
    engine.save_checkpoint(tmp_path)
    saved = whole(engine)
    resumed = build(stage, optimizer=two)
    begun = whole(resumed)
    with pytest.raises(CheckpointError, match=r"written by .*load_optimizer_states=False"):
        resumed.load_checkpoint(tmp_path)
    torch.testing.assert_close(whole(resumed), begun, rtol=0, atol=0)
    resumed.load_checkpoint(tmp_path, load_optimizer_states=False)
    torch.testing.assert_close(whole(resumed), saved)
    assert resumed.get_lr() == [two["params"]["lr"]]
    train(resumed)


@shared_ranks(1)
def test_optimizers_of_one_kind_follow_each_other(tmp_path):
    engine = build(1)
    train(engine)
    engine.save_checkpoint(tmp_path)
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        own = kind(model.parameters(), lr=1e-2)
        keys = set(own.param_groups[0])
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        resumed = deepspeed.initialize(model=model, optimizer=own, config=config)[0]
        resumed.load_checkpoint(tmp_path)
        assert set(own.param_groups[0]) <= keys | {"step"}
        train(resumed)
        assert resumed.global_steps == 2


@pytest.mark.parametrize("stage", [0, 3])
@shared_ranks(2)
def test_a_resume_that_replaces_the_learning_rate_says_so(stage, tmp_path):
    engine = build(stage)
    train(engine)
    engine.save_checkpoint(tmp_path)
    resumed = build(stage, optimizer={"type": "AdamW", "params": {"lr": 5e-3}})
    with Told() as lines:
        resumed.load_checkpoint(tmp_path)
    assert resumed.get_lr() == [1e-2]
    assert said(lines, "0.01", "0.005", "load_optimizer_states=False") == (dist.get_rank() == 0)
    same = build(stage)
    with Told() as lines:
        same.load_checkpoint(tmp_path)
    assert not said(lines, "learning rate")


# ---- engines, steps and optimizers


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_two_engines_on_one_model(stage):
    older = build(stage)
    train(older)
    with Told() as lines:
        newer = build(stage, model=older.module)
    assert said(lines, "0.weight", "older engine", "destroy()") == (dist.get_rank() == 0)
    train(newer)
    with pytest.raises(UsageError, match=r"another engine was made later that trains .*weight"):
        train(older)
    before = whole(newer)
    newer.zero_grad()
    older.zero_grad()
    torch.testing.assert_close(whole(newer), before, rtol=0, atol=0)


@shared_ranks(1)
def test_an_engine_may_go_on_after_a_newer_one_is_destroyed():
    older = build(1)
    train(older)
    newer = build(1, model=older.module)
    train(newer)
    newer.destroy()
    train(older)
    assert older.global_steps == 2


@shared_ranks(2)
def test_one_engine_after_another_is_no_mistake():
    model = build(1).module  # the engine is gone, though nobody destroyed it
    with Told() as lines:
        engine = build(1, model=model)
        engine.destroy()
        build(3, model=model)
    assert lines == []


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_a_model_that_is_frozen_is_told(stage):
    def frozen():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).requires_grad_(False)

    first = dist.get_rank() == 0
    with Told() as lines:
        build(stage, model=frozen(), optimizer=None)
    assert not said(lines, "frozen")
    with Told() as lines:
        build(stage, model=frozen())
    assert said(lines, "all parameters of the model are frozen") == first
    with Told() as lines:  # as a list of those that require a gradient is
        build(stage, model=frozen(), model_parameters=[])
    assert said(lines, "no AdamW is made, because model_parameters is empty") == first
    if stage > 1:
        return
    for unfrozen in (False, True):  # a pipeline one of whose stages is frozen trains the other
        layers = [nn.Linear(8, 8).requires_grad_(unfrozen), nn.Linear(8, 2).requires_grad_(False)]
        row = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
        with Told() as lines:
            build(stage, model=row)
        assert said(lines, "all parameters of the model are frozen") == (first and not unfrozen)


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_a_destroyed_engine_says_so_and_where(tmp_path, stage):
    engine = build(stage)
    loss = engine(torch.ones(2, 8)).mean()
    engine.destroy()
    engine.destroy()
    for use in (
        lambda: engine(torch.ones(2, 8)),
        lambda: engine.backward(loss),
        engine.step,
        engine.zero_grad,
        engine.module_state_dict,
        lambda: engine.save_checkpoint(str(tmp_path)),
        lambda: engine.load_checkpoint(str(tmp_path)),
        lambda: engine.save_16bit_model(str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=r"destroyed at .*test_mistakes\.py:\d+ `engine\.destroy\(\)`"):
            use()
    again = build(stage, model=engine)  # as `accelerator.prepare` of what it returned before
    assert again.module is engine.module
    train(again)
    assert again.was_step_applied()


@shared_ranks(2)
def test_a_model_left_in_shards_says_so_and_where():
    engine = build(3)
    engine.destroy()
    model, batch = engine.module, torch.ones(2, 8)
    for use in (model, model[0]):
        with pytest.raises(UsageError, match=r"0\.weight is in shards.*destroyed at .*test_mistakes\.py:\d+"):
            use(batch)
    again = build(3, model=model)
    train(again)
    again.destroy()
    kept = build(3, model=nn.Linear(8, 2), zero_optimization={"stage": 3})  # small parameters stay whole
    kept.destroy()
    assert kept.module(batch).shape == (2, 2)


@shared_ranks(2)
def test_a_destroyed_pipeline_says_so_and_where():
    row = deepspeed.pipe.PipelineModule([nn.Linear(8, 8), nn.Linear(8, 2)], num_stages=2, loss_fn=nn.MSELoss())
    engine = build(0, model=row)
    engine.destroy()
    data = iter([(torch.ones(2, 8), torch.ones(2, 2))] * 2)
    for use in (engine.train_batch, lambda: engine.eval_batch(data, num_micro_batches=1)):
        with pytest.raises(UsageError, match=r"destroyed at .*test_mistakes\.py:\d+"):
            use()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_without_a_backward_is_none(stage, size):
    ranks(size)(_steps_without_backward)(stage=stage)


def _steps_without_backward(stage):
    engine = build(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    train(engine)
    before, rate = whole(engine), engine.get_lr()
    with Told() as lines:
        engine.step()
        engine.step()
    assert (engine.global_steps, engine.was_step_applied(), engine.get_lr()) == (1, False, rate)
    assert len([line for line in lines if "no rank has had a gradient" in line]) == 1
    torch.testing.assert_close(whole(engine), before, rtol=0, atol=0)
    train(engine)
    assert engine.global_steps == 2


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_a_backward_that_gives_the_optimizer_nothing_is_told(stage):
    """The loss depends on a layer that the optimizer does not have."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_optimization": {"stage": stage}}
    )[0]
    with Told() as lines:
        engine.backward(model[1](torch.ones(2, 8)).square().mean())
        engine.step()
    assert said(lines, "after a backward", "no rank has had a gradient", "depend on parameters of the optimizer")
    assert not said(lines, "Call engine.backward")
    assert engine.global_steps == 0


@pytest.mark.parametrize(("stage", "threshold"), [(0, 0), (1, 0), (2, 0), (3, 10**5)])
@shared_ranks(2)
def test_a_rank_without_a_backward_takes_part(stage, threshold):
    """It has no batch left, but the others step: its gradients count as zero.

    At stage 3 it would be missing where parameters are gathered, so that these stay whole here.
    """
    engine = build(stage, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": threshold})
    if dist.get_rank() == 0:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    assert engine.global_steps == 1
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [1, 2])
@shared_ranks(1)
def test_a_missing_optimizer_is_told_at_once(stage):
    with Told() as lines:
        engine = build(stage, optimizer=None)
    assert said(lines, "there is no optimizer", f"stage {stage}", "'optimizer'")
    engine.backward(engine(torch.ones(2, 8)).sum())
    with pytest.raises(DeepSpeedError, match="needs an optimizer"):
        engine.step()
    with Told() as lines:
        build(3, optimizer=None)  # inference in shards
    assert not said(lines, "no optimizer")


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(1)
def test_parameters_without_values(stage):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(UsageError, match=r"meta device.*0\.weight.*to_empty.*zero\.Init"):
        build(stage, model=model)


@ranks(1)
def test_trained_parameters_of_complex_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2, dtype=torch.cfloat))
    with pytest.raises(UsageError, match=r"1\.weight is a trained parameter of torch\.complex64.*view_as_complex"):
        build(3, model=model)
    build(3, model=nn.Sequential(nn.Linear(8, 2), nn.Linear(8, 2, dtype=torch.cfloat).requires_grad_(False)))


@ranks(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_train_where_nothing_has_to_be_gathered():
    def model():
        return nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 2)))

    for stage in (0, 2):
        engine = build(stage, model=model())
        before = whole(engine)
        train(engine)
        assert all((before[name] != value).any() for name, value in whole(engine).items())
    with pytest.raises(UsageError, match=r"gathers parameters in hooks, which 1 has not.*stage 2 or lower"):
        build(3, model=model())


# ---- whose error it is


@shared_ranks(1)
def test_an_error_of_a_signal_is_not_the_collectives():
    """As torch raises it in the main thread, wherever that is, when a worker of a data loader dies."""

    def died(*_):
        raise RuntimeError("DataLoader worker (pid 42) is killed by signal: Killed.")

    def operation(*_):
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, died)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
            operation()
    finally:
        error = caught.value
        assert isinstance(error, failure.FAILURES)
        assert failure.explain((), error, (), []) is error
        signal.signal(signal.SIGUSR1, before)


def test_a_rank_that_finished_early_is_not_called_killed():
    advice = failure._advice(RuntimeError("Connection closed by peer [127.0.0.1]"), SimpleNamespace(ranks=(0, 1)))
    assert "ranks [0, 1] ended or left" in advice
    assert "finished before this rank did (has its loader fewer batches?)" in advice


@shared_ranks(2)
def test_warnings_of_a_load_come_from_one_rank(tmp_path):
    engine = build(1)
    with Told() as lines:
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert said(lines, "no file 'latest'") == (dist.get_rank() == 0)


# ---- what people expect of parameters and optimizers


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(2)
def test_schedules_of_torch_take_the_optimizer(stage, precision):
    engine = build(stage, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
    seen = []
    engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(2):
        train(engine)
        schedule.step()
    assert engine.get_lr() == [2.5e-3]
    assert len(seen) == 2


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_load_state_dict_of_the_module_takes_whole_values(stage):
    engine, other = build(stage), build(0)
    train(other)
    values = whole(other)
    engine.module.load_state_dict(values)
    torch.testing.assert_close(whole(engine), values)
    train(engine)
    train(other)
    wrong = {**values, "0.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=r"0\.weight.*(3, 3)"):
        engine.module.load_state_dict(wrong)


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_copies_of_a_model(stage):
    engine = build(stage)
    train(engine)
    values = whole(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
        average = torch.optim.swa_utils.AveragedModel(engine.module)
        average.update_parameters(engine.module)
    for other in (twin, average.module):
        assert {type(param) for param in other.parameters()} == {nn.Parameter}
        torch.testing.assert_close(dict(other.named_parameters()), values, check_dtype=False)
    with Told() as lines:
        [param.detach().clone() for param in engine.module.parameters()]
    assert said(lines, "empty between its uses", "GatheredParameters") == (stage == 3)


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_a_penalty_over_all_parameters(stage):
    engine = build(stage)
    train(engine)

    def penalised():
        penalty = sum(param.square().sum() for param in engine.module.parameters())
        engine.backward(engine(torch.ones(2, 8)).square().mean() + 1e-2 * penalty)
        engine.step()

    if stage < 3:
        penalised()
        return
    with pytest.raises(UsageError, match=r"used in the loss while it is sharded.*GatheredParameters"):
        penalised()


@pytest.mark.parametrize("stage", STAGES)
@shared_ranks(2)
def test_clipping_by_hand(stage):
    engine = build(stage, gradient_clipping=0)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    with Told() as lines:
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
    assert said(lines, "clips nothing", "gradient_clipping") == (stage > 0)
    assert (norm > 0) == (stage == 0)
    engine.step()
