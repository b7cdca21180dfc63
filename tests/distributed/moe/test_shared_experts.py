"""Shared experts of a model's own blocks: computed while tokens travel, with the block's own results."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm
from deepspeed.moe import shared
from tests.distributed.moe.models import EXPERTS, TOKENS, WIDTH, StackedExperts
from tests.harness import ranks


class Block(nn.Module):
    """As DeepSeek's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), StackedExperts()
        self.shared_experts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, hidden_states):
        kept, shape = hidden_states, hidden_states.shape
        weights, chosen = self.gate(hidden_states).softmax(-1).topk(2)
        hidden_states = hidden_states.view(-1, WIDTH)
        chosen, weights = chosen.view(-1, 2), weights.view(-1, 2)
        hidden_states = self.experts(hidden_states, chosen, weights).view(*shape)
        return hidden_states + self.shared_experts(kept)


class Doubling(Block):
    """Its shared expert sees other values than the block."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        routed = self.experts(flat, chosen, weights)
        return (routed + self.shared_experts(2 * flat)).view_as(hidden_states)


class Before(Block):
    """As Qwen's: the shared expert comes first."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH)
        beside = self.shared_experts(flat)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        return (self.experts(flat, chosen, weights) + beside).view_as(hidden_states)


class Model(nn.Module):
    def __init__(self, block: type[Block], again: bool = False) -> None:
        super().__init__()
        self.inward, self.block, self.again = nn.Linear(WIDTH, WIDTH), block(), again

    def forward(self, tokens):
        hidden = self.inward(tokens)
        out = checkpoint(self.block, hidden, use_reentrant=False) if self.again else self.block(hidden)
        return out.square().mean()


class Story:
    """Who does what when."""

    def __init__(self, patch) -> None:
        self.told: list[str] = []
        plain = comm.all_to_all_single

        def watched(output, tensor, *args, **kwargs):
            if not tensor.is_floating_point():
                return plain(output, tensor, *args, **kwargs)
            self.told.append("leave")
            work, told = plain(output, tensor, *args, **kwargs), self.told

            class Work:
                def wait(self):
                    told.append("arrive")
                    return work.wait()

            return Work()

        patch.setattr(comm, "all_to_all_single", watched)

    def listen(self, module):
        module.register_forward_hook(lambda *_: self.told.append("shared"))
        module[0].weight.register_hook(lambda _: self.told.append("shared"))


def compare(model, stage, story=None):
    """Two steps beside the same model whole on every rank."""
    whole = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    if story is not None:
        story.listen(model.block.shared_experts)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        both = torch.randn(2, 2, TOKENS, WIDTH, generator=generator)
        expected = sum(whole(given) for given in both) / 2
        expected.backward()
        loss = engine(both[dist.get_rank()])
        total = loss.detach() / 2
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach())
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            for param in whole.parameters():
                param -= 0.1 * param.grad
        whole.zero_grad()
    given = torch.ones(1, TOKENS, WIDTH)
    if story is not None:
        story.told.clear()
    with torch.no_grad():
        torch.testing.assert_close(engine(given), whole(given))
    engine.destroy()


@ranks(2)
def test_shared_experts_run_while_tokens_travel():
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        forward = "leave shared arrive leave arrive".split()
        for stage in (0, 3):
            compare(Model(Block), stage, story)
            assert story.told == forward
        model = Model(Block)
        config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": 2}}
        engine = deepspeed.initialize(model=model, config=config)[0]
        story.listen(model.block.shared_experts)
        story.told.clear()
        engine.backward(engine(torch.randn(1, TOKENS, WIDTH)))
        assert story.told == [*forward, *"leave arrive leave shared arrive".split()]
        engine.destroy()


@ranks(2)
def test_blocks_of_other_kinds_stay_right():
    torch.manual_seed(0)
    for block, again in ((Block, True), (Doubling, False), (Doubling, True), (Before, False)):
        compare(Model(block, again), stage=1)


def test_what_the_source_tells():
    assert shared.called_after(Block, "experts") == ("shared_experts",)
    assert shared.called_after(Doubling, "experts") == ("shared_experts",)
    assert shared.called_after(Before, "experts") == ()
    assert shared.called_after(nn.Linear, "experts") == ()
    made = type("Made", (nn.Module,), {"forward": eval("lambda self, x: self.experts(x)")})
    assert shared.called_after(made, "experts") == ()
