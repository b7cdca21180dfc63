"""OpenRLHF's `DeepspeedStrategy` with its `Actor` and its loss; its calls of `torch.cuda` are replaced here."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests import harness
from tests.clients.server import SERVER
from tests.clients.tiny import llama, tokens
from tests.harness import ranks
from tests.projects.stand_ins import needs, stand_ins

pytestmark = [needs("openrlhf"), pytest.mark.slow]

STEPS, MICRO, ACCUMULATE, RATE, DECAY, CLIP = 3, 2, 2, 1e-2, 0.1, 0.5


@pytest.fixture(autouse=True)
def _server(monkeypatch):
    monkeypatch.setattr(harness, "SERVER", SERVER)


@contextlib.contextmanager
def on_cpu():
    with stand_ins("flash_attn", "pylatexenc"):
        import openrlhf.utils.deepspeed.deepspeed as module

    made = module.init_device_mesh
    with contextlib.ExitStack() as stack:
        for name in ("set_device", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
        stack.enter_context(mock.patch.object(module, "init_device_mesh", lambda _, *a, **k: made("cpu", *a, **k)))
        yield


def strategy_of(stage, **options):
    from openrlhf.utils import get_strategy

    strategy = get_strategy(
        SimpleNamespace(
            train=SimpleNamespace(micro_batch_size=MICRO, batch_size=2 * MICRO * ACCUMULATE),
            ds=SimpleNamespace(**{"zero_stage": stage, "param_dtype": "fp32", "tensor_parallel_size": 1, **options}),
            local_rank=-1,
        )
    )
    strategy.setup_distributed()
    return strategy


def settings(**options):
    adam = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": DECAY}
    steps = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": STEPS, "max_norm": CLIP}
    return {"optim": "adam", "adam": adam, **steps, **options}


def samples(count=2 * MICRO * ACCUMULATE):
    """The same samples in every step, so that losses fall."""
    return torch.tensor([row["input_ids"] for row in tokens(count)])


def loss_of(actor, rows):
    """As the loop of SFTTrainer: log probabilities of the actor, averaged over tokens."""
    from openrlhf.models import SFTLoss

    mask = torch.ones_like(rows)
    found, _ = actor(rows, attention_mask=mask, return_output=True, return_logprobs=True)
    return SFTLoss()(found, mask[:, :-1])


def train(strategy, actor, optimizer, scheduler, steps=STEPS):
    """The mean loss of all ranks and the gradient norm of every step."""
    losses, norms = [], []
    for _ in range(steps):
        total = 0.0
        for rows in samples().chunk(2)[dist.get_rank()].split(MICRO):
            loss = loss_of(actor, rows)
            strategy.backward(loss, actor, optimizer)
            strategy.optimizer_step(optimizer, actor, scheduler)
            total += strategy.all_reduce(loss.item()) / ACCUMULATE
        losses.append(total)
        norms.append(strategy.get_grad_norm(actor))
    return losses, norms


def plain():
    """The same in one process: mean of the losses of all rows."""
    from openrlhf.models import Actor
    from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters

    actor = Actor(llama())
    actor.packing_samples = False
    groups = get_optimizer_grouped_parameters(actor.model, DECAY)
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    losses, norms = [], []
    for _ in range(STEPS):
        loss = loss_of(actor, samples())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(actor.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_an_actor_trains_as_in_a_plain_run(stage, tmp_path):
    from transformers import LlamaForCausalLM

    with on_cpu():
        from openrlhf.models import Actor

        expected = plain()
        strategy = strategy_of(stage)
        assert strategy.accumulated_gradient == ACCUMULATE
        actor = Actor(llama())
        actor.packing_samples = False
        (actor, optimizer, scheduler), average = strategy.prepare((actor, settings()), Actor(llama(seed=1)))
        assert isinstance(actor.model, deepspeed.DeepSpeedEngine)
        assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)

        losses, norms = train(strategy, actor, optimizer, scheduler)
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert norms == pytest.approx(expected[1], abs=1e-5)
        assert losses[-1] < losses[0]
        assert scheduler.get_last_lr() == [RATE, RATE]

        strategy.save_ckpt(actor.model, str(tmp_path / "checkpoint"), tag="step3", client_state={"seen": 24})
        after, _ = train(strategy, actor, optimizer, scheduler, steps=1)
        _, state = strategy.load_ckpt(actor.model, str(tmp_path / "checkpoint"))
        assert state["seen"] == 24
        assert train(strategy, actor, optimizer, scheduler, steps=1)[0] == after

        strategy.save_model(actor, SimpleNamespace(save_pretrained=lambda *_: None), str(tmp_path / "model"))
        saved = Actor(LlamaForCausalLM.from_pretrained(tmp_path / "model"))
        saved.packing_samples = False
        with torch.no_grad():
            rows = samples()
            actor.eval()
            torch.testing.assert_close(loss_of(actor, rows), loss_of(saved, rows))
        # An average over steps, as for an EMA model; stage 3 gathers what it needs.
        for _ in range(ACCUMULATE):
            strategy.moving_average(actor.model, average.model, beta=0.0)
        with deepspeed.zero.GatheredParameters(list(average.model.parameters())):
            for (name, value), other in zip(saved.model.named_parameters(), average.model.parameters(), strict=True):
                torch.testing.assert_close(other.detach(), value.detach(), msg=name)
