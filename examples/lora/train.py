"""LoRA over the 4-bit weights of a small Llama, of which each of two ranks holds a half; saved as PEFT's files.

deepspeed --num_gpus 2 examples/lora/train.py
"""

from __future__ import annotations

import tempfile
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
    engine, *_ = deepspeed.initialize(model=build(), config=str(Path(__file__).with_name("ds_config.json")))
    losses = []
    for step in range(30):
        ids = ((torch.arange(16) + 7 * (step + torch.arange(4)[:, None])) % 64).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    layer = engine.module.model.layers[0].mlp.gate_proj
    folder = Path(tempfile.gettempdir()) / "deepspeed-lora-example"
    save_adapters(engine.module, folder)
    load_adapters(build(), folder)
    if engine.global_rank == 0:
        trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
        print(f"{trained:,} parameters trained; a weight of {layer.input_dim} x {layer.output_dim} takes", end=" ")
        print(f"{layer.held.nbytes:,} bytes on a rank; loss {losses[0]:.2f} to {losses[-1]:.2f}; adapters in {folder}")


if __name__ == "__main__":
    main()
