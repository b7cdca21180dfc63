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
from deepspeed.errors import UsageError
from deepspeed.moe.shared_experts import LazyOutput, called_after, called_before
from tests.distributed.moe.models import EXPERTS, TOKENS, WIDTH, StackedExperts
from tests.harness import shared_ranks


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
        out = self.experts(flat, chosen, weights)
        beside = torch.sigmoid(flat[:, :1]) * beside
        return (out + beside).view_as(hidden_states)


class BeforeOthers(Block):
    """Its shared expert comes first and sees other values than the block."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH)
        beside = self.shared_experts(2 * flat)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        return torch.add(self.experts(flat, chosen, weights), beside).view_as(hidden_states)


class Early(Block):
    """Needs the result before its experts."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH)
        beside = self.shared_experts(flat)
        weights, chosen = self.gate(flat + beside).softmax(-1).topk(2)
        return (self.experts(flat, chosen, weights) + beside).view_as(hidden_states)


class Handing(Block):
    """Hands the result to something that may not know promises."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH)
        beside = self.shared_experts(flat)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        return self.joined(self.experts(flat, chosen, weights), beside).view_as(hidden_states)

    def joined(self, one, other):
        return one + other


class Changing(Block):
    """Changes values in place."""

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, WIDTH).clone()
        beside = self.shared_experts(flat)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        weights /= weights.sum(-1, keepdim=True).detach()
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


@shared_ranks(2)
def test_shared_experts_run_while_tokens_travel():
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        forward = "leave shared arrive leave arrive".split()
        for block in (Block, Before):
            for stage in (0, 3):
                compare(Model(block), stage, story)
                assert story.told == forward, f"{block.__name__} at stage {stage}"
            model = Model(block)
            config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": 2}}
            engine = deepspeed.initialize(model=model, config=config)[0]
            story.listen(model.block.shared_experts)
            story.told.clear()
            engine.backward(engine(torch.randn(1, TOKENS, WIDTH)))
            assert story.told == [*forward, *"leave arrive leave shared arrive".split()], block.__name__
            engine.destroy()


@shared_ranks(2)
def test_blocks_of_other_kinds_stay_right():
    torch.manual_seed(0)
    kinds = (Block, True), (Doubling, False), (Doubling, True), (Before, True), (BeforeOthers, False)
    for block, again in (*kinds, (Early, False), (Handing, False), (Changing, False)):
        compare(Model(block, again), stage=1)


@shared_ranks(2)
def test_without_gradients():
    for block in (Block, Before):
        torch.manual_seed(0)
        model = Model(block)
        whole = copy.deepcopy(model)
        config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": 2}}
        engine = deepspeed.initialize(model=model, config=config)[0]
        given = torch.randn(1, TOKENS, WIDTH)
        with torch.inference_mode():
            torch.testing.assert_close(engine.eval()(given), whole(given), msg=block.__name__)
        beside = model.block.shared_experts(given)  # outside its block
        assert type(beside) is torch.Tensor, block.__name__
        torch.testing.assert_close(beside, whole.block.shared_experts(given))
        engine.destroy()


def test_promises():
    layer, given = nn.Linear(2, 3), torch.ones(4, 2, requires_grad=True)
    told = []
    layer.register_forward_hook(lambda *_: told.append(1))
    promise = LazyOutput.of("layer", layer, given)
    assert told == []
    assert promise.shape == (4, 3)
    out = (2 * promise + promise[:, :1] - torch.stack([promise, promise]).sum(0)).sum()
    assert told == [1], "computed once"
    assert type(out) is torch.Tensor
    (grad,) = torch.autograd.grad(out, given)
    torch.testing.assert_close(grad, 3 * layer.weight[0].expand(4, 2))
    changed = torch.ones(4, 2)
    promise = LazyOutput.of("layer", layer, changed)
    changed += 1
    with pytest.raises(UsageError, match=r"layer is computed while tokens travel, but the tokens .* changed in place"):
        promise.kept()


def test_what_the_source_tells():
    assert called_after(Block, "experts") == ("shared_experts",)
    assert called_after(Doubling, "experts") == ("shared_experts",)
    assert called_after(Before, "experts") == ()
    assert called_after(nn.Linear, "experts") == ()
    made = type("Made", (nn.Module,), {"forward": eval("lambda self, x: self.experts(x)")})
    assert called_after(made, "experts") == ()
    assert called_before(made, "experts") == ()
    for block in (Before, BeforeOthers):
        assert called_before(block, "experts") == ("shared_experts",), block.__name__
    for block in (Block, Doubling, Early, Handing, Changing, nn.Linear):
        assert called_before(block, "experts") == (), block.__name__


@pytest.mark.usefixtures("with_transformers")
def test_what_the_source_of_transformers_tells():
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    assert called_before(modeling.Qwen2MoeSparseMoeBlock, "experts") == ("shared_expert",)
