"""1-bit Adam, 1-bit LAMB and 0/1 Adam on real ranks against a simulation of all of them in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm.compressed import CompressedBackend, SignErrors, sign_mean
from deepspeed.comm.records import CollectiveFinished
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.utils import safe_set_full_grad, safe_set_full_optimizer_state
from tests.distributed.zero.onebit_simulation import CASES, SIZES, Model, OwnedExchange, SimulatedAdam, data
from tests.harness import shared_ranks

# The same with a variance that stays early, and local steps after it.
SOON = {
    "OneBitAdam": {"freeze_step": 4},
    "OneBitLamb": {"freeze_step": 4},
    "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
}


def engine_of(kind, *, numbers=None, model=None, **options):
    params = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.01, **(numbers or CASES[kind][1])}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": params},
        **options,
    }
    return deepspeed.initialize(model=Model() if model is None else model, config=config)[0]


def train(engine, first, last):
    for step in range(first, last + 1):
        engine.backward(engine(*data(step, dist.get_rank())))
        engine.step()


def values_of(engine):
    return {name: param.detach().clone().float() for name, param in engine.module.named_parameters()}


def assert_close(found, expected, atol=2e-5):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", list(CASES))
@shared_ranks(2, 4, 8)
def test_fifty_steps_are_those_of_the_published_rule(kind):
    engine, (simulated, numbers) = engine_of(kind), CASES[kind]
    expected = simulated(dist.get_world_size(), **numbers)
    for step in range(1, 51 if dist.get_world_size() == 2 else 37):
        train(engine, step, step)
        model = expected.step().models[dist.get_rank()]
        assert_close(values_of(engine), {name: param.detach() for name, param in model.named_parameters()})
    engine.destroy()


def whole_values(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return values_of(engine)


TOGETHER = {"var_freeze_step": 13, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 1}
"""0/1 Adam without local steps; the owner adds decay, so that it is compared without."""


@pytest.mark.parametrize("kind", list(CASES))
@shared_ranks(2, 4)
def test_owners_of_pieces_follow_the_published_rule(kind):
    simulated, numbers = CASES[kind]
    decay = 0.0 if kind == "ZeroOneAdam" else 0.01
    numbers = TOGETHER if kind == "ZeroOneAdam" else numbers
    for stage in (1, 2, 3):
        keys = {"stage3_param_persistence_threshold": 10} if stage == 3 else {}
        rule = {**numbers, "weight_decay": decay}
        engine = engine_of(kind, numbers=rule, zero_optimization={"stage": stage, **keys})
        expected = simulated(dist.get_world_size(), stage=stage, decay=decay, **numbers)
        for step in range(1, 23 if stage == 2 else 17):
            expected.lr = engine.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 3)
            train(engine, step, step)
            model = expected.step().models[0]
            if step % 10 in (1, 2) or step == 14:
                found = {name: param.detach() for name, param in model.named_parameters()}
                assert_close(whole_values(engine), found)
        engine.destroy()


@shared_ranks(2)
def test_owners_follow_the_rule_with_clipping_and_accumulation():
    """Gradients are clipped by the norm of all that a rank has alone, once they stay there."""
    for stage in (1, 2, 3):
        engine = engine_of(
            "OneBitAdam",
            numbers={"freeze_step": 4},
            gradient_accumulation_steps=2,
            gradient_clipping=0.2,
            zero_optimization={"stage": stage},
        )
        expected = SimulatedAdam(2, stage=stage, freeze_step=4)
        plain = expected.gradients

        def gradients(expected=expected, plain=plain):
            found, step = [], expected.count
            for count in (2 * step - 1, 2 * step):
                expected.count = count
                found.append(plain())
            expected.count = step
            means = [{name: (one[name] + two[name]) / 2 for name in SIZES} for one, two in zip(*found, strict=True)]
            together = [{name: sum(each[name] for each in means) / 2 for name in SIZES}] * 2
            for each in means if step > 4 else together[:1]:
                norm = math.sqrt(sum(float(grad.square().sum()) for grad in each.values()))
                for name in SIZES:
                    each[name] = each[name] * min(0.2 / (norm + 1e-6), 1.0)
            return means if step > 4 else together

        expected.gradients = gradients
        for step in range(1, 13):
            for count in (2 * step - 1, 2 * step):
                train(engine, count, count)
            expected.step()
            found = {name: param.detach() for name, param in expected.models[0].named_parameters()}
            assert_close(whole_values(engine), found)
        engine.destroy()


class LateModel(Model):
    """With a parameter that is not used at first, whose gradient tells of ranks alone."""

    def __init__(self):
        super().__init__()
        self.late = nn.Parameter(torch.ones(11))
        self.never = nn.Parameter(torch.ones(3))
        self.uses = False

    def forward(self, rows, wanted):
        loss = super().forward(rows, wanted)
        return loss + (self.late * tell(dist.get_rank())).sum() if self.uses else loss


def tell(rank):
    return torch.linspace(1, 2, 11) * (rank + 1)


@shared_ranks(2)
def test_parameters_that_are_used_late_have_the_mean_of_their_gradients():
    for stage in (1, 3):
        engine = engine_of(
            "OneBitAdam", model=LateModel(), numbers={"freeze_step": 4}, zero_optimization={"stage": stage}
        )
        train(engine, 1, 6)
        plain = nn.Parameter(torch.ones(11))
        adam = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
        engine.module.uses = True
        for step in range(7, 15):
            train(engine, step, step)
            if step < 11:
                plain.grad = (tell(0) + tell(1)) / 2
                adam.step()
                assert_close(whole_values(engine), {"late": plain.detach(), "never": torch.ones(3)})
        moved = whole_values(engine)["late"] - plain.detach()
        assert 0 < float(moved.abs().max()) < 0.1  # by signs
        engine.destroy()


@shared_ranks(2)
def test_groups_have_numbers_of_their_own():
    """Two groups with the numbers of one are that one; each with its own learning rate moves by that."""
    for stage in (0, 2):
        found = []
        for rates in ((1e-2,), (1e-2, 1e-2), (1e-2, 0.0)):
            model = Model()
            members = [list(model.parameters())] if len(rates) == 1 else [[model.weight, model.bias], [model.scale]]
            groups = [{"params": params, "lr": rate} for params, rate in zip(members, rates, strict=True)]
            optimizer = OnebitLamb(groups, betas=(0.9, 0.99), eps=1e-3, freeze_step=3)
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            train(engine, 1, 8)
            found.append(values_of(engine))
            engine.destroy()
        if stage == 0:  # blocks of owners are those of groups
            assert_close(found[1], found[0])
        assert torch.equal(found[2]["scale"], Model().scale.detach())
        assert float((found[2]["weight"] - Model().weight).abs().max()) > 1e-3


@shared_ranks(2)
def test_owners_notice_edits_and_loads_at_another_stage(tmp_path):
    engine = engine_of("OneBitAdam", zero_optimization={"stage": 1})
    expected = SimulatedAdam(2, stage=1, freeze_step=10)
    for _ in range(13):
        train(engine, expected.count + 1, expected.count + 1)
        expected.step()
    expected.m["bias"] = torch.linspace(-0.1, 0.1, 5)
    safe_set_full_optimizer_state(engine.module.bias, expected.m["bias"], "exp_avg")
    train(engine, 14, 14)
    expected.step()
    assert_close(values_of(engine), {name: param.detach() for name, param in expected.models[0].named_parameters()})
    engine.backward(engine(*data(15, dist.get_rank())))
    with pytest.raises(UsageError, match=r"gradient of bias cannot be set.*stay on the ranks"):
        safe_set_full_grad(engine.module.bias, torch.ones(5))
    engine.zero_grad()
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    other = engine_of("OneBitAdam", zero_optimization={"stage": 3})
    other.load_checkpoint(str(tmp_path))
    expected.exchange = OwnedExchange(2, stage=3)  # errors begin anew
    for step in (15, 16):
        train(other, step, step)
        expected.step()
    assert_close(whole_values(other), {name: param.detach() for name, param in expected.models[0].named_parameters()})
    other.destroy()


@shared_ranks(2)
def test_the_warm_up_is_adam_and_lamb():
    for kind, other in (("OneBitAdam", "AdamW"), ("OneBitLamb", "Lamb"), ("ZeroOneAdam", "AdamW")):
        numbers = {"var_update_scaler": 1000} if kind == "ZeroOneAdam" else {"freeze_step": 1000}
        found, plain = engine_of(kind, numbers=numbers), engine_of(other, numbers={"weight_decay": 0.01})
        train(found, 1, 8)
        train(plain, 1, 8)
        assert_close(values_of(found), values_of(plain), atol=1e-6)
        found.destroy()
        plain.destroy()


@shared_ranks(2)
def test_checkpoints_go_on_before_and_after_the_variance_stays(tmp_path):
    sharded = [("OneBitAdam", 2), ("OneBitLamb", 1), ("OneBitLamb", 3), ("ZeroOneAdam", 2)]
    stages = [(kind, 0) for kind in CASES] + sharded
    for kind, stage in stages:
        numbers = TOGETHER if stage and kind == "ZeroOneAdam" else SOON[kind]
        for before in (2, 6, 15) if kind == "ZeroOneAdam" else (2, 6):  # the last with sums of local steps, or without
            engine = engine_of(kind, numbers=numbers, zero_optimization={"stage": stage})
            train(engine, 1, before)
            folder = str(tmp_path / f"{kind}{stage}{before}")
            engine.save_checkpoint(folder)
            train(engine, before + 1, before + 4)
            expected = whole_values(engine)
            engine.destroy()
            again = engine_of(kind, numbers=numbers, zero_optimization={"stage": stage})
            again.load_checkpoint(folder)
            train(again, before + 1, before + 4)
            for name, value in whole_values(again).items():
                assert torch.equal(value, expected[name]), (kind, before, name)
            again.destroy()


@shared_ranks(2)
def test_other_precisions_accumulation_clipping_and_overflow():
    bf16, fp16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
    cases = [(kind, precision, 0) for kind in CASES for precision in (bf16, fp16)]
    cases += [("OneBitAdam", fp16, 1), ("OneBitLamb", bf16, 2), ("OneBitAdam", bf16, 3), ("OneBitLamb", fp16, 3)]
    cases += [("ZeroOneAdam", bf16, 3)]
    for kind, precision, stage in cases:
        sharded = {"zero_optimization": {"stage": stage}}
        numbers = TOGETHER if stage and kind == "ZeroOneAdam" else SOON[kind]
        options = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, **precision, **sharded}
        engine = engine_of(kind, numbers=numbers, **options)
        losses = []
        for step in range(1, 41):
            rows, wanted = (part.to(next(engine.module.parameters()).dtype) for part in data(step % 4, 0))
            loss = engine(rows, wanted)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), (kind, precision, stage, losses)
        skipped, held = engine.skipped_steps, whole_values(engine)
        for _ in range(2):  # one rank has an infinite gradient, and all of them skip the step
            rows, wanted = (part.to(next(engine.module.parameters()).dtype) for part in data(1, 0))
            loss = engine(rows, wanted)
            engine.backward(loss * float("inf") if dist.get_rank() == 1 else loss)
            engine.step()
        assert engine.skipped_steps == skipped + 1
        for name, value in whole_values(engine).items():
            assert torch.equal(value, held[name])
        engine.destroy()


@shared_ranks(4)
def test_messages_have_one_bit_per_number_each_way():
    numel = 4 * 4096
    values, errors = torch.randn(numel), []
    errors = [SignErrors.zero(values, 4)]
    seen = []
    with comm.dispatcher.events.subscribe(CollectiveFinished, seen.append):
        sign_mean([values], errors)
    sizes = {event.op: event.bytes for event in seen}
    assert sizes["all_to_all_single"] == numel // 8 + 4 * 4
    assert sizes["all_gather_into_tensor"] == numel // 32 + 4
    # A rank keeps its own part of what it sends, and sends the part that it gathers to all others.
    payload = (numel // 8) * 3 // 4 + 3 * numel // 32
    assert payload == numel // 4 * 3 // 4


@shared_ranks(2, 3)
def test_errors_of_the_mean_do_not_add_up():
    """Over time the sum of what comes is that of the plain means, but for what the last errors are."""
    world, rank = dist.get_world_size(), dist.get_rank()
    backend, generator = CompressedBackend(), torch.Generator().manual_seed(rank)
    numel = 101
    chunk = -(-numel // (8 * world)) * 8
    worker, server = torch.zeros(chunk * world), torch.zeros(chunk)
    came, meant = torch.zeros(numel), torch.zeros(numel)
    for _ in range(200):
        mine = torch.randn(numel, generator=generator) + 0.5
        plain = mine.clone()
        comm.all_reduce(plain)
        meant += plain / world
        came += backend.compressed_allreduce(mine, worker, server, 0)
    assert float((came - meant).abs().max()) < 0.1 * float(meant.abs().max())


@shared_ranks(2)
def test_what_does_not_work_with_them_is_refused():
    keys = {
        "zero_optimization.mics_shard_size": {"zero_optimization": {"stage": 2, "mics_shard_size": 1}},
        "zero_optimization.zero_quantized_gradients": {
            "zero_optimization": {"stage": 2, "zero_quantized_gradients": True}
        },
        'gradient_allreduce_op "sum"': {"gradient_allreduce_op": "sum"},
        "sparse_gradients": {"sparse_gradients": True},
        "optimizer_in_backward.enabled": {"optimizer_in_backward": {"enabled": True}},
    }
    for words, config in keys.items():
        with pytest.raises(DeepSpeedConfigError, match="OneBitAdam") as caught:
            engine_of("OneBitAdam", **config)
        assert words in str(caught.value)
    with pytest.raises(DeepSpeedConfigError, match=r"ZeroOneAdam.*zero_optimization\.stage 2.*local_step_clipper 1"):
        engine_of("ZeroOneAdam", zero_optimization={"stage": 2})
    group = {"params": list(Model().parameters()), "exp_avg_mask": torch.ones(5)}
    with pytest.raises(DeepSpeedConfigError, match=r"exp_avg_mask at zero_optimization\.stage 1 to 3"):
        deepspeed.initialize(
            model=Model(),
            optimizer=OnebitAdam([group], lr=1e-2),
            config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
        )


@shared_ranks(2)
def test_a_client_gives_its_own():
    model = Model()
    optimizer = OnebitAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01, freeze_step=10)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    train(engine, 1, 20)
    other = engine_of("OneBitAdam")
    train(other, 1, 20)
    assert_close(values_of(engine), values_of(other), atol=1e-7)
    for each in (engine, other):
        each.destroy()
