"""Masters, gradients and optimizer states by parameter, against the same training in plain PyTorch."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.zero.states.parameter_state import owner_of
from tests.harness import shared_ranks
from tests.models import PlainLoop, batches, make, share

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = (0, 1, 2, 3)
SAMPLES = 12


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def build(stage, precision="fp32", model=None, *, persistent=0, **config):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["loss_scale"] = 128.0
    engine, *_ = deepspeed.initialize(
        model=make() if model is None else model,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent},
            **section,
            **config,
        },
    )
    return engine


def backward(engine, batch):
    engine.backward(engine(*share(batch, dist.get_rank(), dist.get_world_size())))


def whole(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def assert_near(found, expected, precision):
    """But for rounding, measured by the largest element: squares of gradients are small."""
    share = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(found, expected, rtol=share, atol=share * expected.abs().max().item())


@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_what_the_optimizer_holds(precision):
    world = dist.get_world_size()
    data = batches(3, SAMPLES)
    for stage in STAGES:
        loop = PlainLoop(
            make(), adamw, ranks=world, param=DTYPES[precision], scale=128.0 if precision == "fp16" else 1.0
        )
        engine = build(stage, precision, gradient_clipping=0.05)
        loop.clip = 0.05
        seen = {}

        def remember(_seen=seen, _loop=loop, _clip=loop._clip):
            _seen["grads"] = [m.grad.clone() for m in _loop.masters.parameters()]
            return _clip()

        loop._clip = remember
        params = list(engine.module.parameters())
        assert safe_get_full_optimizer_state(params[0], "exp_avg") is None
        for batch in data:
            loop.step([batch])
            with pytest.raises(ValueError, match="between backward and step"):
                safe_get_full_grad(params[0])
            backward(engine, batch)
            for param, expected in zip(params, seen["grads"], strict=True):
                grad = safe_get_full_grad(param)
                assert grad.dtype == torch.float32
                assert_near(grad, expected, precision)
            engine.step()
        for param, master in zip(params, loop.masters.parameters(), strict=True):
            assert_near(safe_get_full_fp32_param(param), master.detach(), precision)
            for key in ("exp_avg", "exp_avg_sq"):
                expected = loop.optimizer.state[master][key]
                assert_near(safe_get_full_optimizer_state(param, key), expected, precision)
            assert float(safe_get_full_optimizer_state(param, "step")) == 3
        with pytest.raises(ValueError, match=r"'momentum'.*exp_avg"):
            safe_get_full_optimizer_state(params[0], "momentum")
        engine.destroy()


@pytest.mark.parametrize("persistent", [0, 100_000])
@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_what_is_set_is_used(precision, persistent):
    data = batches(2, SAMPLES)
    for stage in STAGES if persistent == 0 else (3,):  # the threshold is one of stage 3 alone
        engine = build(stage, precision, persistent=persistent)
        params = list(engine.module.parameters())
        backward(engine, data[0])
        engine.step()
        values = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(whole(engine))]
        for param, value in zip(params, values, strict=True):
            safe_set_full_fp32_param(param, value)
            safe_set_full_optimizer_state(param, value * 0.1, "exp_avg")
            safe_set_full_optimizer_state(param, value.square(), "exp_avg_sq")
            safe_set_full_optimizer_state(param, 7, "step")
        # the model's own parameters follow at once, in their dtype
        for mine, value in zip(whole(engine), values, strict=True):
            assert torch.equal(mine, value.to(DTYPES[precision]))
        for param, value in zip(params, values, strict=True):
            assert torch.equal(safe_get_full_fp32_param(param), value)
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), value * 0.1)
        backward(engine, data[1])
        for param, value in zip(params, values, strict=True):
            safe_set_full_grad(param, value * 3)
            assert torch.allclose(safe_get_full_grad(param), value * 3, rtol=1e-2 if precision != "fp32" else 1e-6)
        engine.step()
        plain = [nn.Parameter(value.clone()) for value in values]
        optimizer = adamw(plain)
        for param, value in zip(plain, values, strict=True):
            optimizer.state[param] = {"step": torch.tensor(7.0), "exp_avg": value * 0.1, "exp_avg_sq": value.square()}
            param.grad = value * 3
        optimizer.step()
        for param, expected in zip(params, plain, strict=True):
            torch.testing.assert_close(
                safe_get_full_fp32_param(param),
                expected.detach(),
                rtol=1e-5 if precision == "fp32" else 1e-3,
                atol=1e-6,
            )
        engine.destroy()


@shared_ranks(1, 3)
def test_gradients_are_updated_in_one_call():
    batch = batches(1, SAMPLES)[0]
    for stage in STAGES:
        engine = build(stage)
        params = list(engine.module.parameters())
        backward(engine, batch)
        before = [safe_get_full_grad(param) for param in params]
        seen = []

        def half(grad, param, _seen=seen):
            _seen.append(param)
            return grad / 2

        safe_update_full_grad_vectorized(params, half)
        assert all(one is other for one, other in zip(seen, params, strict=True))
        for param, grad in zip(params, before, strict=True):
            assert torch.equal(safe_get_full_grad(param), grad / 2)
        engine.step()
        engine.destroy()


@shared_ranks(1, 3)
def test_chunks_of_stage_3():
    world, rank = dist.get_world_size(), dist.get_rank()
    batch = batches(1, SAMPLES)[0]
    engine = build(3)
    params = list(engine.module.parameters())
    backward(engine, batch)
    for param in params:
        chunk = -(-param.ds_numel // world)
        mine = slice(rank * chunk, (rank + 1) * chunk)

        def padded(full, _mine=mine, _chunk=chunk):
            part = full.reshape(-1)[_mine]
            return nn.functional.pad(part, (0, _chunk - part.numel()))

        assert torch.equal(safe_get_local_fp32_param(param), padded(safe_get_full_fp32_param(param)))
        assert torch.equal(safe_get_local_grad(param), padded(safe_get_full_grad(param)))
        safe_set_local_grad(param, torch.full((chunk,), float(rank + 1)))
        expected = torch.arange(param.ds_numel) // chunk + 1.0
        assert torch.equal(safe_get_full_grad(param).view(-1), expected)
    engine.step()
    for param in params:
        chunk = -(-param.ds_numel // world)
        expected = torch.arange(param.ds_numel) // chunk + 1.0
        assert torch.allclose(safe_get_full_optimizer_state(param, "exp_avg").view(-1), expected * 0.1)
        safe_set_local_optimizer_state(param, torch.full((chunk,), 5.0 + rank), "exp_avg")
        assert safe_get_local_optimizer_state(param, "exp_avg").max() == 5.0 + rank
        safe_set_local_fp32_param(param, torch.full((chunk,), float(rank + 1)))
        assert torch.equal(safe_get_full_fp32_param(param).view(-1), expected)
        with pytest.raises(ValueError, match="with padding"):
            safe_set_local_fp32_param(param, torch.zeros(chunk + 1))
    for value, param in zip(whole(engine), params, strict=True):
        chunk = -(-param.ds_numel // world)
        assert torch.equal(value.view(-1), torch.arange(param.ds_numel) // chunk + 1.0)
    engine.destroy()


@shared_ranks(1, 2)
def test_chunks_exist_at_stage_3_only():
    for stage in (0, 1, 2):
        engine = build(stage)
        with pytest.raises(AssertionError, match="safe_get_full_fp32_param at the other stages"):
            safe_get_local_fp32_param(next(engine.module.parameters()))
        engine.destroy()


class Partly(nn.Module):
    """One layer trained, one frozen, one not used, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.used(self.frozen(x)) * self.scale).pow(2).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 3)
def test_parameters_without(precision):
    for stage in STAGES:
        engine = build(stage, precision, make(Partly))
        model = engine.module
        x = torch.ones(2, 5, dtype=DTYPES[precision]) + dist.get_rank()
        engine.backward(engine(x))
        assert safe_get_full_grad(model.used.weight) is not None
        assert safe_get_full_grad(model.scale).shape == ()
        assert safe_get_full_grad(model.unused.weight) is None
        assert safe_get_full_grad(model.frozen.weight) is None
        assert safe_get_full_fp32_param(model.frozen.weight) is None
        assert safe_get_full_fp32_param(nn.Parameter(torch.ones(2))) is None
        with pytest.raises(ValueError, match="no engine trains"):
            safe_set_full_fp32_param(model.frozen.weight, torch.zeros(5, 5))
        with pytest.raises(ValueError, match=r"\(3, 5\).*\(2,\)"):
            safe_set_full_fp32_param(model.used.weight, torch.zeros(2))
        safe_set_full_grad(model.unused.bias, torch.ones(3))  # nobody computed it, but it is used
        engine.step()
        assert safe_get_full_optimizer_state(model.unused.weight, "exp_avg") is None
        assert torch.allclose(safe_get_full_optimizer_state(model.unused.bias, "exp_avg"), torch.full((3,), 0.1))
        engine.destroy()


@shared_ranks(1, 2)
def test_gradients_so_far_while_they_accumulate():
    data = batches(2, SAMPLES)
    for stage in STAGES:
        engine = build(stage, gradient_accumulation_steps=2)
        param = engine.module.up.weight
        backward(engine, data[0])
        first = safe_get_full_grad(param)
        engine.step()
        backward(engine, data[1])
        both = safe_get_full_grad(param)
        engine.step()
        model = make()
        (model(*data[0]) / 2).backward()
        assert torch.allclose(first, model.up.weight.grad, atol=1e-6)
        (model(*data[1]) / 2).backward()
        assert torch.allclose(both, model.up.weight.grad, atol=1e-6)
        engine.destroy()


@shared_ranks(1, 2)
def test_an_edit_of_the_model_is_seen():
    for stage in STAGES:
        engine = build(stage, "bf16")
        param = engine.module.up.weight
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param.fill_(0.5)
        assert torch.equal(safe_get_full_fp32_param(param), torch.full((24, 8), 0.5))
        engine.destroy()


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their elements."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x):
        return self.image(x).sum() + self.turned.square().sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 2)
def test_parameters_whose_memory_is_not_in_order(precision):
    for stage in STAGES:
        engine = build(stage, precision, Strided())
        x = torch.randn(2, 2, 4, 4, dtype=DTYPES[precision])
        engine.backward(engine(x))
        engine.step()
        for param in engine.module.parameters():
            shape = safe_get_full_fp32_param(param).shape
            new = torch.arange(float(shape.numel())).view(shape)
            safe_set_full_fp32_param(param, new)
            safe_set_full_optimizer_state(param, new + 1, "exp_avg")
            assert torch.equal(safe_get_full_fp32_param(param), new), stage
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), new + 1), stage
        engine.destroy()


@shared_ranks(1, 2)
def test_handles_end_with_their_engine():
    one, other = build(1), build(3, "bf16")
    mine, theirs = one.module.up.weight, other.module.up.weight
    assert owner_of(mine) is not owner_of(theirs)
    assert safe_get_full_fp32_param(mine).shape == safe_get_full_fp32_param(theirs).shape
    one.destroy()
    assert safe_get_full_fp32_param(mine) is None
    assert safe_get_full_fp32_param(theirs) is not None
    other.module = None
    del other
    gc.collect()
    assert safe_get_full_fp32_param(theirs) is None, "a parameter keeps its engine alive"


@shared_ranks(1)
def test_a_parameter_can_be_pickled():
    engine = build(1)
    copy = pickle.loads(pickle.dumps(engine.module))
    assert safe_get_full_fp32_param(copy.up.weight) is None
    assert torch.equal(copy.up.weight, engine.module.up.weight)
