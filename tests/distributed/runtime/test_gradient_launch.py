"""What others see of gradients that are sent while backward still runs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.zero.gradients.replicated import FIRST_BYTES
from tests.harness import shared_ranks

WIDTH = 512  # each weight is as large as the first bucket may be, so that there are several buckets


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.fail = False

    def forward(self, x):
        x = self.layers[0](x)
        if self.fail:
            x.register_hook(_fail)
        for layer in self.layers[1:]:
            x = layer(x)
        return x.square().mean()


def _fail(_):
    raise RuntimeError("on purpose")


def both(**config):
    """An engine, and a model for one process that begins alike."""
    torch.manual_seed(0)
    model = Layers()
    assert model.layers[0].weight.nbytes >= FIRST_BYTES
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], plain


def batches(step):
    return torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(step))


def train(engine, step):
    engine.backward(engine(batches(step)[dist.get_rank()]))
    engine.step()


def train_plain(plain, step):
    (sum(plain(part) for part in batches(step)) / 2).backward()
    for param in plain.parameters():
        param.data.sub_(param.grad)
        param.grad = None


@shared_ranks(2)
def test_the_users_hooks_find_a_gradient():
    engine, _ = both()
    seen = []
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None and p.grad.shape == p.shape))
    for step in range(3):
        train(engine, step)
    assert seen == [True] * 18


@shared_ranks(2)
def test_training_goes_on_after_a_backward_that_failed_with_gradients_on_their_way():
    engine, plain = both()
    train(engine, 0)
    engine.module.fail = True
    with pytest.raises(RuntimeError, match="on purpose"):
        train(engine, 1)
    engine.module.fail = False
    engine.zero_grad()
    train(engine, 2)
    train_plain(plain, 0)
    train_plain(plain, 2)
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("travels", ["fp32", "bf16"])
@shared_ranks(2)
def test_gradients_are_the_mean_after_backward_in_either_dtype(travels):
    engine, plain = both(communication_data_type=travels)
    train(engine, 0)
    engine.backward(engine(batches(1)[dist.get_rank()]))
    train_plain(plain, 0)
    (sum(plain(part) for part in batches(1)) / 2).backward()
    tolerance = {"rtol": 0.02, "atol": 1e-5} if travels == "bf16" else {}
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
