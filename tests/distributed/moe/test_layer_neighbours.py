"""Spread layers of experts where they are used unusually: a rank without tokens, copies of a model that trains."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.moe.layer import MoE
from tests.distributed.moe.models import WIDTH, Model, StackedModel
from tests.distributed.moe.test_auto import config
from tests.harness import shared_ranks

pytestmark = pytest.mark.usefixtures("with_transformers")


def pair(**options):
    """A layer over two ranks, and the same one whole."""
    torch.manual_seed(0)
    given = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0, **options}
    whole = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, **given)
    for param in whole.parameters():
        nn.init.normal_(param)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2, **given)
    layer.set_deepspeed_parallelism()
    first = 2 * dist.get_rank()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(whole.deepspeed_moe.gate.wg.weight)
        own, all_of_them = (each.deepspeed_moe.experts.deepspeed_experts for each in (layer, whole))
        for number, expert in enumerate(own):
            expert.load_state_dict(all_of_them[first + number].state_dict())
    return layer, whole, first


@shared_ranks(2)
def test_the_engine_tells_of_layers_of_experts():
    plain = {"train_batch_size": 2, "log_level": "ERROR"}
    spread = {**plain, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    cases = [
        (nn.Linear(2, 2), plain, []),
        (Model(first=2), plain, [4, 4]),
        (StackedModel(), plain, []),
        (StackedModel(), spread, [4]),
    ]
    for model, given, expected in cases:
        engine = deepspeed.initialize(model=model, config=given)[0]
        assert (engine.has_moe_layers, engine.num_experts) == (bool(expected), expected)
        assert engine.log_level() == "ERROR"
        engine.destroy()


@shared_ranks(2)
def test_a_rank_without_tokens():
    """Others' tokens still come to its experts, and their gradients with them."""
    for k in (1, 2, 3):
        for drops in (True, False):
            layer, whole, first = pair(k=k, drop_tokens=drops)
            tokens = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(3))
            expected, loss, _ = whole(tokens)
            (expected.sum() + loss).backward()
            found, own_loss, _ = layer(tokens[: 7 * (dist.get_rank() == 0)])
            (found.sum() + own_loss).backward()
            if dist.get_rank() == 0:
                torch.testing.assert_close(found, expected, msg=f"k={k}, drop_tokens={drops}")
                torch.testing.assert_close(own_loss, loss)
            else:
                assert found.shape == (0, WIDTH)
                assert own_loss.item() == 0.0
            mine, theirs = (each.deepspeed_moe.experts.deepspeed_experts for each in (layer, whole))
            for number, expert in enumerate(mine):
                for one, other in zip(expert.parameters(), theirs[first + number].parameters(), strict=True):
                    torch.testing.assert_close(one.grad, other.grad, msg=f"k={k}, drop_tokens={drops}")


@shared_ranks(2)
def test_an_expert_that_one_rank_alone_has_frozen():
    """Without ZeRO it stays as it is; from stage 1 on ranks would count other parameters, and say so."""
    for stage in (0, 1, 3):
        torch.manual_seed(stage)
        model = Model(2, 1)
        with torch.no_grad():  # every expert is the first choice of some of the tokens
            model.inward.weight.copy_(torch.eye(WIDTH))
            model.inward.bias.zero_()
            model.first.deepspeed_moe.gate.wg.weight.copy_(torch.eye(WIDTH)[:4])
        kept = model.first.deepspeed_moe.experts.deepspeed_experts[1]
        kept.requires_grad_(dist.get_rank() != 0)
        before = copy.deepcopy(kept.state_dict())
        given = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage},
        }
        if stage:
            with pytest.raises(UsageError, match="freeze the same parameters of all experts") as found:
                deepspeed.initialize(model=model, config=given)
            assert ("first.deepspeed_moe.experts.deepspeed_experts.1.0.weight" in str(found.value)) == (
                dist.get_rank() == 0
            )
            continue
        engine, *_ = deepspeed.initialize(model=model, config=given)
        engine.backward(engine(torch.eye(WIDTH)[:4]))
        engine.step()
        same = all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
        assert same == (dist.get_rank() == 0)
        engine.destroy()


@shared_ranks(2)
def test_copies_of_a_model_that_trains():
    """As whoever averages weights makes them."""
    pytest.importorskip("transformers")
    plain = config()
    del plain["expert_parallel"]
    for model, given in ((Model(2, 1), plain), (StackedModel(), config())):
        engine, *_ = deepspeed.initialize(model=model, config=given)
        tokens = torch.randn(6, WIDTH)
        engine.backward(engine(tokens))
        made = copy.deepcopy(engine.module).eval()
        with torch.no_grad():
            torch.testing.assert_close(made(tokens), engine.eval()(tokens))
        engine.destroy()
