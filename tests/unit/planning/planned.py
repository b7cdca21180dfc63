"""A model that a plan must not hold, and the same step computed for real."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.memory.host import HOST_STORAGES
from deepspeed.profiling.memory_profiler import MemoryPeak, MemoryProfiler
from deepspeed.runtime.out_of_memory import held_tensors

WIDTH, VOCABULARY, LENGTH = 64, 256, 32


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).movedim(-2, 1)
        query, key, value = split.unbind(-2)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.after(hidden))))


class Decoder(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 2, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def gradient_checkpointing_enable(self) -> None:
        self.recompute = True

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


def example_batch(batch: int, sequence: int | None = None) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch, sequence or LENGTH))
    return tokens, tokens


def config(stage: int, steps: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40_000, "stage3_param_persistence_threshold": 100},
        **more,
    }


def measured(model: nn.Module, values: dict[str, Any], world: int) -> MemoryPeak:
    """The peak of three steps that are computed, as rank 0 of a world that torch pretends."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    engine = deepspeed.initialize(model=model, config=values)[0]
    parts = engine._parts
    _, micro, steps = engine.get_batch_info()
    with MemoryProfiler(model, lambda: held_tensors(parts), parts.device, HOST_STORAGES) as profiler:
        for _ in range(3):
            for _ in range(steps):
                engine.backward(engine(*example_batch(micro)))
                engine.step()
    engine.destroy()
    dist.destroy_process_group()
    assert profiler.peak is not None
    return profiler.peak
