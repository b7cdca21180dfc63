"""A pipeline of two stages: deepspeed --num_gpus 4 examples/pipeline/train.py --schedule zb-h1

Four processes make two stages with two replicas each; the model is a row of residual blocks whose head shares the
embedding's weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def head(embedding: nn.Module, hidden: Tensor) -> Tensor:
    """The output layer, by the embedding's weight."""
    return nn.functional.linear(hidden, embedding.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that count upwards from a random number: the next token follows from the last."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        first = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Block) for _ in range(6)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head),
    ]
    module = PipelineModule(layers, num_stages=given.stages, loss_fn=loss_fn, schedule=given.schedule)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = batches(module.mpu().get_data_parallel_rank())
    for step in range(given.steps):
        loss = engine.train_batch(data)
        if deepspeed.comm.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {float(loss):.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()
