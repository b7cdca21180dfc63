"""Tiles under every stage of ZeRO, with accumulation and inside of checkpoints, against plain training."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.sequence.tiling import TiledFusedLogitsLoss, TiledMLP
from tests.closeness import Training, assert_same_training
from tests.harness import ranks

WIDTH, VOCABULARY, LENGTH, STEPS = 8, 12, 9, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def inside(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x, tiles):
        x = self.norm(x)
        return x + (self.inside(x) if tiles is None else TiledMLP.apply(Layer.inside, self, x, tiles))


class Model(nn.Module):
    """Two layers and a head that shares the embedding's weight; with tiles, both kinds of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, hidden, labels):
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def forward(self, tokens, labels, tiles=None, checkpoints=False):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, tiles, use_reentrant=False) if checkpoints else layer(hidden, tiles)
        if tiles is None:
            return self.loss(hidden, labels) / labels.numel()
        total = TiledFusedLogitsLoss.apply(Model.loss, self, hidden, labels, None, tiles, None, "sum")
        return total / labels.numel()


def data(accumulation):
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS * accumulation, 2, dist.get_world_size(), 2, LENGTH)
    return torch.randint(VOCABULARY, shape, generator=generator).unbind()


def plain(accumulation):
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms, window = [], [], []
    for number, (tokens, labels) in enumerate(data(accumulation)):
        parts = [model(*pair) for pair in zip(tokens, labels, strict=True)]
        loss = sum(parts) / len(parts)
        (loss / accumulation).backward()
        window.append(loss.item())
        if (number + 1) % accumulation == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(window) / len(window))
            window = []
    return Training(before, {name: param.detach() for name, param in model.named_parameters()}, losses, norms)


def trained(stage, accumulation, **options):
    model, rank = Model(), dist.get_rank()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses, norms, window = [], [], []
    for tokens, labels in data(accumulation):
        loss = engine(tokens[rank], labels[rank], **options)
        engine.backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        window.append(mean.item() / dist.get_world_size())
        if engine.is_gradient_accumulation_boundary():
            losses.append(sum(window) / len(window))
            window = []
        engine.step()
        if not window:
            norms.append(float(engine.get_global_grad_norm()))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        after = copy.deepcopy({name: param.detach() for name, param in model.named_parameters()})
    engine.destroy()
    return Training(before, after, losses, norms)


@ranks(2, timeout=400)
def test_tiles():
    for accumulation in (1, 2):
        expected = plain(accumulation)
        for stage, tiles, checkpoints in ((0, 4, False), (1, 2, True), (2, 9, False), (3, 4, False), (3, 2, True)):
            found = trained(stage, accumulation, tiles=tiles, checkpoints=checkpoints)
            assert_same_training(found, expected)
