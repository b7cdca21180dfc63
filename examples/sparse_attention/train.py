"""Trains a small causal model whose attention is limited to a window, the first block and some blocks at random.

deepspeed --num_gpus 2 examples/sparse_attention/train.py
"""

import argparse

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.ops.sparse_attention import SparseSelfAttention

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--length", type=int, default=150, help="tokens of a sequence, of any number")
parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
arguments = parser.parse_args()

WIDTH, HEADS, TOKENS = 64, 4, 32


class Block(nn.Module):
    """Attention by the config's pattern, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = SparseSelfAttention(max_seq_length=arguments.length)  # its pattern comes with the engine
        self.forward_layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.inputs(self.norm(hidden)).chunk(3, dim=-1)
        )
        hidden = hidden + self.attention(query, key, value).transpose(1, 2).flatten(2)
        return hidden + self.forward_layers(hidden)


class Model(nn.Module):
    """Predicts each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(arguments.length, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.blocks(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
    "sparse_attention": {
        "mode": "bigbird",
        "block": 16,
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "unidirectional",
    },
}
engine = deepspeed.initialize(model=Model(), config=config)[0]
for step in range(1, arguments.steps + 1):
    start = torch.randint(TOKENS, (4, 1), device=engine.device)
    tokens = (start + 3 * torch.arange(arguments.length, device=engine.device)) % TOKENS  # each is three above the last
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
    if comm.get_rank() == 0 and (step % 20 == 0 or step == arguments.steps):
        print(f"step {step}: loss {loss.item():.3f}")
