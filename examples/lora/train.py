"""LoRA over the 4-bit weights of a small Llama, of which each of two ranks holds a half; saved as PEFT's files.

deepspeed --num_gpus 2 examples/lora/train.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.linear import Init, LoRAConfig, QuantizationConfig, load_adapters, save_adapters

LORA = LoRAConfig(lora_r=8, lora_alpha=16, base_weight_sharding=2)
INT4 = QuantizationConfig(q_bits=4, q_dtype=torch.int8, group_size=128)


def build() -> LlamaForCausalLM:
    """The model as it would come from `from_pretrained`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    deepspeed.init_distributed()
    with Init(LORA, INT4):
        return LlamaForCausalLM(config)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--output", default="adapter", help="the folder that the adapters go to")
    options.add_argument("--local_rank", type=int)
    given = options.parse_args()
    engine, *_ = deepspeed.initialize(model=build(), config=str(Path(__file__).with_name("ds_config.json")))
    losses = []
    for step in range(given.steps):
        ids = ((torch.arange(16) + 7 * (step + torch.arange(4)[:, None])) % 64).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    layer = engine.module.model.layers[0].mlp.gate_proj
    save_adapters(engine.module, given.output)
    load_adapters(build(), given.output)
    if engine.global_rank == 0:
        trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
        print(f"{trained:,} parameters trained; loss {losses[0]:.2f} to {losses[-1]:.2f}; adapters in {given.output}")
        print(f"a weight of {layer.input_dim} x {layer.output_dim} takes {layer.held.nbytes:,} bytes on a rank")


if __name__ == "__main__":
    main()
