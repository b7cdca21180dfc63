"""What travels between ranks that share experts, what they agree upon, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import LayoutError
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import drop_tokens, gather_tokens
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.mpu import current_layout
from deepspeed.published import groups
from tests.distributed.moe.models import EXPERTS, TOKENS, WIDTH, Model, adopt, batches, scrambled
from tests.harness import shared_ranks


def config(**sections):
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **sections}


class Sent:
    """Bytes of every all-to-all of tokens."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: list[int] = []
        plain = comm.all_to_all_single

        def counted(output, tensor, *args, **kwargs):
            if tensor.is_floating_point():
                self.sizes.append(tensor.numel() * tensor.element_size())
            return plain(output, tensor, *args, **kwargs)

        monkeypatch.setattr(comm, "all_to_all_single", counted)


@shared_ranks(2)
def test_bytes_are_those_of_the_formula():
    with pytest.MonkeyPatch.context() as patch, ParallelLayout.build() as layout:
        sent = Sent(patch)
        torch.manual_seed(dist.get_rank())
        for k, factor, drops in ((1, 1.0, True), (2, 0.5, True), (2, 1.0, False)):
            expert = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
            layer = MoE(WIDTH, expert, EXPERTS, 2, k=k, capacity_factor=factor, min_capacity=1, drop_tokens=drops)
            layer.join(layout)
            sent.sizes.clear()
            layer(torch.randn(TOKENS, WIDTH, requires_grad=True))[0].sum().backward()
            if drops:  # there and back, in forward and backward
                capacity = -(-TOKENS * k * factor // EXPERTS)
                assert sent.sizes == [int(EXPERTS * capacity * WIDTH * 4)] * 4
            else:  # every assignment there, and what came back
                assert sent.sizes[0] == sent.sizes[2] == TOKENS * k * WIDTH * 4
                assert sent.sizes[1] == sent.sizes[3]
                total = torch.tensor(sent.sizes[1])
                dist.all_reduce(total)
                assert total.item() == 2 * TOKENS * k * WIDTH * 4


@shared_ranks(2)
def test_the_dense_part_runs_while_tokens_travel():
    order = []
    plain = comm.all_to_all_single

    def watched(output, tensor, *args, **kwargs):
        if not tensor.is_floating_point():
            return plain(output, tensor, *args, **kwargs)
        order.append("leave")
        work = plain(output, tensor, *args, **kwargs)

        class Work:
            def wait(self):
                order.append("arrive")
                return work.wait()

        return Work()

    with pytest.MonkeyPatch.context() as patch, ParallelLayout.build() as layout:
        patch.setattr(comm, "all_to_all_single", watched)
        for drops in (True, False):
            expert = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
            layer = MoE(WIDTH, expert, EXPERTS, 2, use_residual=True, drop_tokens=drops)
            layer.join(layout)
            layer.mlp.register_forward_hook(lambda *_: order.append("dense"))
            layer.mlp[0].weight.register_hook(lambda _: order.append("dense"))
            order.clear()
            layer(torch.randn(TOKENS, WIDTH, requires_grad=True))[0].sum().backward()
            assert order == "leave dense arrive leave arrive leave arrive leave dense arrive".split()


@shared_ranks(2)
def test_an_overflow_of_one_expert_is_everybodys():
    whole = scrambled(Model(k=1))
    for stage in (0, 2, 3):
        model = Model(2, 2, k=1)
        adopt(model, whole)
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        engine, *_ = deepspeed.initialize(model=model, config=config(fp16=fp16, zero_optimization={"stage": stage}))
        if dist.get_rank() == 1:
            expert = next(model.second.deepspeed_moe.experts.parameters())
            expert.register_hook(lambda grad: grad * float("inf"))
        engine.backward(engine(batches(0, 0)[dist.get_rank()].half()))
        engine.step()
        assert (engine.skipped_steps, engine.loss_scale()) == (1, 8.0)
        engine.destroy()


@shared_ranks(2)
def test_tensor_parallel_ranks_take_a_part_of_the_tokens_each():
    """Experts that are not split: ranks that have equal tokens send different ones, and all get all results."""
    with ParallelLayout.build(tp=2) as layout:
        current_layout.set(layout)
        values = torch.arange(6.0).requires_grad_()
        assert drop_tokens(values).tolist() == ([0, 1, 2] if dist.get_rank() == 0 else [3, 4, 5])
        assert gather_tokens(drop_tokens(values * 2)).tolist() == [0, 2, 4, 6, 8, 10]
        torch.manual_seed(0)
        options = {"k": 2, "top2_2nd_expert_sampling": False, "min_capacity": 1}
        for drops in (True, False):
            expert = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
            layer = MoE(WIDTH, expert, EXPERTS, drop_tokens=drops, **options)
            plain = copy.deepcopy(layer)
            layer.set_deepspeed_parallelism()
            assert groups._get_expert_data_parallel_world_size("ep_size_1") == 2
            tokens = torch.randn(TOKENS, WIDTH)
            mine, theirs = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
            out, expected = layer(mine)[0], plain(theirs)[0]
            torch.testing.assert_close(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(mine.grad, theirs.grad)
            pairs = zip(layer.deepspeed_moe.experts.parameters(), plain.deepspeed_moe.experts.parameters(), strict=True)
            for param, other in pairs:
                dist.all_reduce(param.grad)  # each rank computed its part of the tokens
                torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-5)
        current_layout.reset()


@shared_ranks(2)
def test_sizes_that_do_not_fit_are_refused():
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 3, ep_size=3)
    with pytest.raises(LayoutError, match="expert-parallel size 3 does not divide the 2 ranks"):
        deepspeed.initialize(model=nn.Sequential(layer), config=config())
    marked = nn.Linear(2, 2)
    marked.weight.allreduce, marked.weight.group_name = False, "ep_size_9"
    model = nn.Sequential(marked, MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, ep_size=2))
    with pytest.raises(LayoutError, match=r"the group 'ep_size_9', but the model has experts in \['ep_size_2'\]"):
        deepspeed.initialize(model=model, config=config())
    assert groups._get_expert_parallel_group_dict() == {}, "a construction that failed leaves nothing behind"
