"""What ZeRO refuses, with a message that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, LostEditError, UsageError
from deepspeed.ops.lamb import FusedLamb
from tests.harness import shared_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def build(stage=3, model=None, **zero):
    torch.manual_seed(0)
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    return deepspeed.initialize(model=model or nn.Linear(6, 6), config={**CONFIG, "zero_optimization": section})[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@shared_ranks(1, 2)
def test_an_untested_optimizer(stage):
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    with pytest.raises(DeepSpeedConfigError, match="zero_allow_untested_optimizer: SGD was not tested"):
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={**config, "zero_allow_untested_optimizer": True},
    )
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


@shared_ranks(1)
def test_an_optimizer_that_does_not_work_element_by_element():
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    for kind in (torch.optim.Adafactor, FusedLamb):
        with pytest.raises(DeepSpeedConfigError, match="its numbers would change with the number of ranks"):
            deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)


@pytest.mark.parametrize("stage", [0, 1, 3])
@shared_ranks(2)
def test_torch_muon_has_no_whole_matrices(stage):
    model = nn.Linear(4, 4, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    if stage:
        with pytest.raises(DeepSpeedConfigError, match=r"Muon computes with whole matrices.*MuonWithAuxAdam"):
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


@shared_ranks(2)
def test_a_module_that_is_left_in_another_dtype():
    """At stage 0 gradients are summed where they lie, so that the module cannot be converted back in between."""
    engine = build(stage=0, model=nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    engine.module[0].to(torch.float64)
    with pytest.raises(
        UsageError, match=r"0\.\w+ is torch\.float64 by now, but the engine trains it as torch\.float32"
    ):
        engine.backward(engine.module[0](torch.ones(2, 6, dtype=torch.float64)).sum())


@shared_ranks(2)
def test_an_edit_that_would_be_lost():
    engine = build()
    weight = engine.module.weight
    with deepspeed.zero.GatheredParameters([weight]):
        before = weight.detach().clone()
        weight.data.zero_()
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight, before)
    strict = build(enable_sanity_checks=True)
    with (
        pytest.raises(LostEditError, match=r"weight.*modifier_rank=0"),
        deepspeed.zero.GatheredParameters([strict.module.weight]),
    ):
        strict.module.weight.data.zero_()


@shared_ranks(2)
def test_backwards_that_hooks_do_not_see():
    """Gradients of inputs by torch.func are those of plain PyTorch; what cannot work says what does."""
    engine, plain = (build(stage, nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))) for stage in (3, 0))
    plain.load_module_state_dict(engine.module_state_dict())
    inputs = torch.arange(12.0).view(2, 6) / 12 + torch.distributed.get_rank()
    for run in (lambda each: torch.vmap(each)(inputs), lambda each: torch.func.jvp(each, (inputs,), (inputs,))[1]):
        with pytest.raises(UsageError, match=r"torch\.vmap, .*`with deepspeed\.zero\.GatheredParameters"):
            engine.backward(run(engine).sum())
        engine.zero_grad()  # some came before the error
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            engine.backward(run(engine).sum())
        plain.backward(run(plain).sum())
        engine.step(), plain.step()
        torch.testing.assert_close(engine.module_state_dict(), plain.module_state_dict())
    found, expected = (torch.func.grad(lambda x, each=each: each(x).square().sum())(inputs) for each in (engine, plain))
    torch.testing.assert_close(found, expected)
    loss = engine(inputs).sum()
    engine.optimizer.parameter_offload._register_deepspeed_module(engine.module)
    with pytest.raises(UsageError, match="whose stage-3 hooks were taken off after its forward"):
        engine.backward(loss)


@shared_ranks(2)
def test_unused_parameters_where_they_are_not_ignored():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.never = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.used(x)

    engine = build(stage=2, model=Unused(), ignore_unused_parameters=False)
    engine.backward(engine(torch.ones(2, 6)).sum())
    with pytest.raises(UsageError, match=r"never\.weight"):
        engine.step()
