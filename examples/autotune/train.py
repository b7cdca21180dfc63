"""Trains a small decoder with the config that it is given: a script whose config is searched.

deepspeed --autotuning tune --num_gpus 2 examples/autotune/train.py --deepspeed_config examples/autotune/ds_config.json
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm

VOCABULARY, LENGTH, WIDTH = 512, 64, 128


class Decoder(nn.Module):
    """Feed-forward layers between an embedding and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build_model() -> nn.Module:
    """What the planner looks for: with it the search begins with a forecast."""
    torch.manual_seed(0)
    return Decoder()


def example_batch(batch: int, sequence: int | None) -> tuple[Tensor, Tensor]:
    """Tokens and labels of so many samples."""
    tokens = torch.randint(VOCABULARY, (batch, sequence or LENGTH))
    return tokens, tokens


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    engine = deepspeed.initialize(args=arguments, model=build_model())[0]
    loss = torch.zeros(())
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        tokens, labels = example_batch(engine.train_micro_batch_size_per_gpu(), None)
        loss = engine.backward(engine(tokens.to(engine.device), labels.to(engine.device)))
        engine.step()
    if comm.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {engine.global_steps} steps")


if __name__ == "__main__":
    main()
