"""A small pipeline model, the same model in one process, and the data of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY, WIDTH, LENGTH = 13, 8, 3
SEED = 77


class Block(nn.Module):
    """A residual layer; passes on a tuple with a mask, which has no gradient."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, extra = inputs
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden)))) * extra["mask"], extra


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask = (tokens > 0).unsqueeze(-1)
        return nn.functional.embedding(tokens, self.weight), {"mask": mask}


def logits(embed: nn.Module, inputs: tuple[Tensor, Any]) -> Tensor:
    """The head that shares the embedding's weight."""
    return inputs[0] @ embed.weight.t()


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def specs(blocks: int = 6) -> list[Any]:
    return [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(Block) for _ in range(blocks)),
        TiedLayerSpec("embed", Embed, forward_fn=logits),
    ]


def pipeline(stages: int, blocks: int = 6, **options: Any) -> PipelineModule:
    return PipelineModule(
        specs(blocks),
        num_stages=stages,
        loss_fn=loss_of,
        seed_layers=True,
        base_seed=SEED,
        partition_method=options.pop("partition_method", "uniform"),
        **options,
    )


class Whole(nn.Module):
    """The same layers in one process; parameters have the names that they have in a pipeline."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.tied_modules = nn.ModuleDict({"embed": Embed()})
        for number in range(1, blocks + 1):
            torch.manual_seed(SEED + number)
            self.add_module(str(number), Block())
        self.blocks = blocks

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        value = self.tied_modules["embed"](tokens)
        for number in range(1, self.blocks + 1):
            value = getattr(self, str(number))(value)
        return loss_of(logits(self.tied_modules["embed"], value), labels)


def micro_batch(step: int, replica: int, number: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * replica + number)
    shape = (rows, LENGTH)
    return (
        torch.randint(VOCABULARY, shape, generator=generator),
        torch.randint(VOCABULARY, shape, generator=generator),
    )


def data(replica: int, count: int, steps: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(steps):
        for number in range(count):
            yield micro_batch(step, replica, number)


def config(count: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **more,
    }


def train_whole(steps: int, replicas: int, count: int, clip: float = 0.0) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after some steps in one process."""
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            for number in range(count):
                loss = model(*micro_batch(step, replica, number)) / (count * replicas)
                loss.backward()
                total += float(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def train_pipeline(stages: int, count: int, steps: int, stage: int = 0, **options: Any) -> tuple[list[float], Any]:
    """Losses, and the engine."""
    more = options.pop("config", {})
    module = pipeline(stages, **options)
    engine, *_ = deepspeed.initialize(model=module, config=config(count, stage, **more))
    source = data(module.mpu().get_data_parallel_rank(), count)
    return [float(engine.train_batch(source)) for _ in range(steps)], engine


def weights(engine: Any) -> dict[str, Tensor]:
    """The whole weights of this rank's layers."""
    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def assert_equal(engine: Any, expected: dict[str, Tensor], within: float = 1e-6) -> None:
    for name, value in weights(engine).items():
        assert value.shape == expected[name].shape, name
        assert float((value - expected[name]).abs().max()) < within, name
