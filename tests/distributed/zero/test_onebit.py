"""1-bit Adam, 1-bit LAMB and 0/1 Adam on real ranks against a simulation of all of them in one process."""

from __future__ import annotations

import itertools
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
from tests.harness import shared_ranks

SIZES = {"weight": (5, 7), "bias": (5,), "scale": (3, 5)}


class Model(nn.Module):
    """A loss whose gradients differ from rank to rank."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SIZES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, rows, wanted):
        hidden = torch.tanh(rows @ self.weight.T + self.bias)
        return (hidden @ self.scale.T - wanted).square().mean()


def data(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)


# ---- the published rule, without a line of the library


def signs(values):
    scale = values.norm() / values.numel() ** 0.5
    return scale * torch.where(values < 0, -1.0, 1.0)


class Exchange:
    """The compressed mean of all workers, by the size of a chunk that every one of them owns."""

    owned = False

    def __init__(self, workers):
        self.workers, self.errors = workers, {}

    def mean(self, key, values):
        count, numel = self.workers, values[0].numel()
        chunk = -(-numel // (8 * count)) * 8
        mine, theirs = self.errors.setdefault(key, ([torch.zeros(numel) for _ in values], torch.zeros(numel)))
        meant = []
        for worker, value in enumerate(values):
            whole = value.reshape(-1) + mine[worker]
            meant.append(signs(whole))
            mine[worker].copy_(whole - meant[-1])
        total = sum(meant) / count + theirs
        found = torch.cat([signs(part) for part in total.split(chunk)])
        theirs.copy_(total - found)
        return found.view(values[0].shape)


class OwnedExchange(Exchange):
    """The same where workers own pieces of parameters, each of which is compressed by itself."""

    owned = True

    def __init__(self, workers, stage):
        super().__init__(workers)
        self.stage = stage

    def cuts(self, name):
        """Elements of a parameter that each of its owners has."""
        numels = {each: math.prod(shape) for each, shape in SIZES.items()}
        if self.stage == 3:
            return chunks(0, numels[name], -(-numels[name] // self.workers))
        start = sum(numels[each] for each in list(SIZES)[: list(SIZES).index(name)])
        return chunks(start, numels[name], -(-sum(numels.values()) // self.workers))

    def mean(self, key, values):
        count, cuts = self.workers, self.cuts(key)
        mine, theirs = self.errors.setdefault(
            key, ([torch.zeros(values[0].numel()) for _ in values], torch.zeros(values[0].numel()))
        )
        meant = []
        for worker, value in enumerate(values):
            whole = value.reshape(-1) + mine[worker]
            meant.append(torch.cat([signs(part) for part in whole.split(cuts)]))
            mine[worker].copy_(whole - meant[-1])
        total = sum(meant) / count + theirs
        found = torch.cat([signs(part) for part in total.split(cuts)])
        theirs.copy_(total - found)
        return found.view(values[0].shape)


def chunks(start, numel, size):
    """The lengths of the runs into which multiples of `size` cut so many elements from `start` on."""
    places = [start, *range((start // size + 1) * size, start + numel, size), start + numel]
    return [stop - begin for begin, stop in itertools.pairwise(places)]


class Simulation:
    """All workers one after the other; they agree on parameters except inside of local steps."""

    def __init__(self, workers, *, stage=0, lr=1e-2, betas=(0.9, 0.99), eps=1e-3, decay=0.01, **numbers):
        self.models = [Model() for _ in range(workers)]
        self.renewed = lambda: OwnedExchange(workers, stage) if stage else Exchange(workers)
        self.exchange = self.renewed()
        self.count = 0
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.numbers = numbers
        self.m = {name: torch.zeros(shape) for name, shape in SIZES.items()}
        self.v = {name: torch.zeros(shape) for name, shape in SIZES.items()}

    def gradients(self):
        found = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            model(*data(self.count, rank)).backward()
            found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        return found

    def move(self, name, amount):
        for model in self.models:
            getattr(model, name).data.add_(amount)

    def step(self):
        self.count += 1
        gradients = self.gradients()
        for name in SIZES:
            self.update(name, [each[name] for each in gradients], self.models[0].get_parameter(name).data)
        return self

    def adam(self, name, mean):
        self.m[name] = self.betas[0] * self.m[name] + (1 - self.betas[0]) * mean
        self.v[name] = self.betas[1] * self.v[name] + (1 - self.betas[1]) * mean**2


class SimulatedAdam(Simulation):
    def update(self, name, gradients, param):
        freeze, (beta1, beta2) = self.numbers["freeze_step"], self.betas
        if self.count <= freeze:
            self.adam(name, sum(gradients) / len(gradients))
        else:
            self.m[name] = self.exchange.mean(name, [beta1 * self.m[name] + (1 - beta1) * g for g in gradients])
        root = (self.v[name] / (1 - beta2 ** min(self.count, freeze))).sqrt() + self.eps
        update = self.m[name] / (1 - beta1**self.count) / root
        self.move(name, -self.lr * (update + self.decay * param))


class SimulatedZeroOne(Simulation):
    """0/1 Adam with an interval of the variance, then local steps."""

    def __init__(self, workers, **numbers):
        super().__init__(workers, **numbers)
        self.interval, self.updates, self.seen = 1, 0, 0
        self.local, self.locals = 1, 0
        self.own = None

    def step(self):
        self.count += 1
        beta1, beta2 = self.betas
        numbers, gradients = self.numbers, self.gradients()
        first = 1 - beta1**self.count
        frozen = self.count > numbers["var_freeze_step"] + 1
        varies = not frozen and self.count % self.interval == 0
        self.updates += varies
        second = 1 - beta2**self.updates
        if frozen and self.own is None:
            self.own = [{name: value.clone() for name, value in self.m.items()} for _ in self.models]
            self.sums = [{name: torch.zeros(shape) for name, shape in SIZES.items()} for _ in self.models]
            self.lrs, self.exchange = 0.0, self.renewed()
        self.lrs = self.lrs + self.lr / first if frozen else 0.0
        for name in SIZES:
            grads = [each[name] for each in gradients]
            root = lambda: (self.v[name] / second).sqrt() + self.eps  # noqa: B023, E731
            if not frozen:
                if varies:
                    self.adam(name, sum(grads) / len(grads))
                else:
                    mean = self.exchange.mean(name, grads)
                    self.m[name] = beta1 * self.m[name] + (1 - beta1) * mean
                param = self.models[0].get_parameter(name).data
                self.move(name, -self.lr * (self.m[name] / first / root() + self.decay * param))
                continue
            for own, sums, model, grad in zip(self.own, self.sums, self.models, grads, strict=True):
                own[name] = beta1 * own[name] + (1 - beta1) * grad
                param = model.get_parameter(name).data
                moved = -self.lr * (own[name] / first / root() + self.decay * param)
                param.add_(moved)
                sums[name] += moved
            if self.count % self.local == 0:
                for sums, model in zip(self.sums, self.models, strict=True):
                    model.get_parameter(name).data.sub_(sums[name])
                total = self.exchange.mean(name, [sums[name] * root() for sums in self.sums])
                for own, sums in zip(self.own, self.sums, strict=True):
                    own[name] = -total / self.lrs
                    sums[name].zero_()
                self.move(name, total / root())
        if frozen and self.count % self.local == 0:
            self.lrs = 0.0
        if frozen:
            self.locals += 1
            if self.locals == numbers["local_step_scaler"]:
                self.locals, self.local = 0, min(numbers["local_step_clipper"], 2 * self.local)
        elif varies:
            self.seen += 1
            if self.seen == numbers["var_update_scaler"]:
                self.seen, self.interval = 0, 2 * self.interval
        return self


class SimulatedLamb(Simulation):
    """1-bit LAMB."""

    def step(self):
        self.count += 1
        gradients, (beta1, beta2), freeze = self.gradients(), self.betas, self.numbers["freeze_step"]
        rate = self.lr * (1 - beta2 ** min(self.count, freeze)) ** 0.5 / (1 - beta1**self.count)
        params = {name: param.data for name, param in self.models[0].named_parameters()}
        if self.count == 1:
            self.kept, self.last = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 1.0)
        if self.count <= freeze:
            for name in SIZES:
                self.adam(name, sum(each[name] for each in gradients) / len(gradients))
                update = self.m[name] / (self.v[name].sqrt() + self.eps) + self.decay * params[name]
                ratio = float((params[name].norm() / update.norm()).clamp(0.01, 10.0))
                if ratio != 1.0:
                    self.kept[name] = 0.9 * self.kept[name] + 0.1 * ratio
                self.move(name, -rate * ratio * update)
            self.fresh = {name: value.clone() for name, value in self.v.items()}
            return self
        if self.exchange.owned:
            self.scaling = dict.fromkeys(SIZES, 1.0)
        elif self.count == freeze + 1:
            roots = {name: float(self.m[name].square().mean().sqrt()) for name in SIZES}
            self.scaling = {name: sum(roots.values()) / len(roots) / root for name, root in roots.items()}
        old = dict(self.m)
        flats = [
            torch.cat(
                [((beta1 * old[name] + (1 - beta1) * each[name]) * self.scaling[name]).reshape(-1) for name in SIZES]
            )
            for each in gradients
        ]
        sizes = [params[name].numel() for name in SIZES]
        if self.exchange.owned:
            each = zip(SIZES, zip(*(flat.split(sizes) for flat in flats), strict=True), strict=True)
            parts = [self.exchange.mean(name, list(values)) for name, values in each]
        else:
            parts = self.exchange.mean("all", flats).split(sizes)
        for name, part in zip(SIZES, parts, strict=True):
            self.m[name] = part.view(SIZES[name]) / self.scaling[name]
            told = (self.m[name] - beta1 * old[name]) / (1 - beta1)
            self.fresh[name] = beta2 * self.fresh[name] + (1 - beta2) * told**2
            root = self.v[name].sqrt() + self.eps
            plain = self.m[name] / root
            update = plain + self.decay * params[name]
            share = min(1.0, float(plain.norm() / update.norm()))
            factor = float((root / (self.fresh[name].sqrt() + self.eps)).max()) * share + 1 - share
            factor = min(max(factor, 0.5), 4.0)
            factor = min(max(factor, self.last[name] * 0.9), self.last[name] * 1.1)
            self.last[name] = factor
            self.move(name, -rate * self.kept[name] * factor * update)
        return self


CASES = {
    "OneBitAdam": (SimulatedAdam, {"freeze_step": 10}),
    "OneBitLamb": (SimulatedLamb, {"freeze_step": 10}),
    "ZeroOneAdam": (
        SimulatedZeroOne,
        {"var_freeze_step": 24, "var_update_scaler": 4, "local_step_scaler": 8, "local_step_clipper": 4},
    ),
}

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
