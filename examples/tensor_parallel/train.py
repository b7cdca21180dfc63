"""A Llama of Transformers whose layers are split over two ranks; the model and the loop are unmodified.

deepspeed --num_gpus 2 examples/tensor_parallel/train.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards from a random number: easily learnt."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(16) + 7 * index) % 64


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    whole = sum(param.numel() for param in model.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        model=model, training_data=Counting(), config=str(Path(__file__).with_name("ds_config.json"))
    )
    here = sum(param.numel() for param in engine.module.parameters())
    losses = []
    for batch in loader:
        loss = engine(input_ids=batch.to(engine.device), labels=batch.to(engine.device)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        print(f"{here:,} of {whole:,} parameters on a rank; loss {losses[0]:.2f} to {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
