"""A Llama of random weights that learns to count; ranks share each sequence.

deepspeed --num_gpus 2 examples/long_sequences/train.py --deepspeed_config examples/long_sequences/ds_config.json

The script is unmodified: the last two keys of the config turn sequence parallelism on, and batches are whole.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed import comm

VOCABULARY = 64


def model(width: int, length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batch(step: int, rows: int, length: int, replica: int) -> dict[str, torch.Tensor]:
    """Numbers counted from a random one on, by a random step."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    first, stride = torch.randint(1, VOCABULARY, (2, rows, 1), generator=generator)
    tokens = (first + stride * torch.arange(length)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def train(config: Any, *, steps: int, width: int, length: int) -> list[float]:
    """The losses of the steps."""
    engine, *_ = deepspeed.initialize(model=model(width, length), config=config)
    replica = deepspeed.utils.groups.get_data_parallel_rank()
    losses = []
    for step in range(steps):
        whole = batch(step, engine.train_micro_batch_size_per_gpu(), length, replica)
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in whole.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    args = deepspeed.add_config_arguments(parser).parse_args()
    losses = train(args.deepspeed_config, steps=args.steps, width=args.width, length=args.length)
    if comm.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
