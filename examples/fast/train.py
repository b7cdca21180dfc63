"""A Llama of random weights that learns to count, on fused kernels and 8-bit products.

deepspeed examples/fast/train.py --deepspeed_config examples/fast/ds_config.json

The script is unmodified: the last two sections of the config turn the kernels on.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed

VOCABULARY = 64


def model(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(step: int, rows: int) -> torch.Tensor:
    """Numbers counted from a random one on, by a random step."""
    generator = torch.Generator().manual_seed(step)
    first, stride = torch.randint(1, VOCABULARY, (2, rows, 1), generator=generator)
    return (first + stride * torch.arange(32)) % VOCABULARY


def train(config: Any, *, steps: int, width: int) -> list[float]:
    """The losses of the steps."""
    engine, *_ = deepspeed.initialize(model=model(width), config=config)
    losses = []
    for step in range(steps):
        tokens = batch(step, engine.train_micro_batch_size_per_gpu()).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    deepspeed.add_config_arguments(parser)
    options = parser.parse_args()
    losses = train(options.deepspeed_config, steps=options.steps, width=options.width)
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
