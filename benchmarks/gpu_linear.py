"""LoRA over a Llama of 8B parameters: frozen weights in int4 beside bf16, in tokens per second, bytes and losses.

    python -m benchmarks.gpu_linear                                  # on a CUDA device of 80 GiB or more
    python -m benchmarks.gpu_linear --steps 200 --sequence 512       # do they learn alike?
    python -m benchmarks.gpu_linear --tiny                           # a small shape, on any machine

Both start from the same random weights, of which one rounds those of linear layers, and see the same batches. A step is
forward, backward and AdamW on the adapters.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.linear import Init, LoRAConfig, QuantizationConfig

__all__ = ["main"]

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
WARM_UP = 3
SOME_TOKENS = 64  # of the vocabulary, so that there is something to learn
WINDOWS = 10
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
}


def build(shape: dict[str, int], quantised: bool, device: torch.device) -> LlamaForCausalLM:
    """The model with adapters, made on the device."""
    torch.manual_seed(0)
    rank = 64 if shape is SHAPE else 4
    codes = QuantizationConfig(q_bits=4, q_dtype=torch.int8, group_size=128) if quantised else None
    with device, Init(LoRAConfig(lora_r=rank, lora_alpha=16), codes):
        return LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=torch.bfloat16)


def batch(step: int, length: int, device: torch.device) -> Tensor:
    """A sequence that counts in steps of its own."""
    return ((7 * step + (1 + step % 5) * torch.arange(length)) % SOME_TOKENS)[None].to(device)


def measured(shape: dict[str, int], quantised: bool, steps: int, length: int, device: torch.device) -> dict[str, Any]:
    """Train, and say what it took."""
    model = build(shape, quantised, device)
    held = sum(param.nbytes for param in model.parameters())
    if on_gpu := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    losses, times = [], []
    for step in range(steps):
        start = time.perf_counter()
        ids = batch(step, length, device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())  # waits for the forward; the last one is waited for below
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    some = max(1, steps // WINDOWS)
    found = {
        "base": "int4" if quantised else "bf16",
        "tokens_per_s": length / statistics.median(times[min(WARM_UP, steps - 1) :]),
        "weights_gib": held / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [round(statistics.mean(losses[at : at + some]), 4) for at in range(0, steps, some)],
    }
    engine.destroy()
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each base, then what int4 has of bf16's tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small shape, on the CPU too")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--base", choices=("int4", "bf16"), help="one of both alone")
    parser.add_argument("--sequence", type=int, help="tokens of a step; 4096, or 32 with --tiny")
    given = parser.parse_args(words)
    if not (given.tiny or torch.cuda.is_available()):
        parser.error("no CUDA device was found; use --tiny for a small shape on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, length = (TINY, 32) if given.tiny else (SHAPE, 4096)
    if not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = f"file://{tempfile.mkdtemp()}/store"
        deepspeed.init_distributed(backend, init_method=store, rank=0, world_size=1, verbose=False)
    rates = {}
    for base in (given.base,) if given.base else ("int4", "bf16"):
        found = measured(shape, base == "int4", given.steps, given.sequence or length, device)
        rates[base] = found["tokens_per_s"]
        print(
            json.dumps({key: round(each, 6) if isinstance(each, float) else each for key, each in found.items()}),
            flush=True,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if len(rates) > 1:
        print(json.dumps({"int4_of_bf16": round(rates["int4"] / rates["bf16"], 3)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
