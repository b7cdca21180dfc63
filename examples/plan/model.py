"""A model for `ds_plan`: the function builds it, and `example_batch` gives what it takes.

ds_plan examples/plan/model.py examples/zero2_bf16.json --world 16 --device h200
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 32_000, 1024


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Tensors [samples, tokens, width]."""
        seen = self.norm(hidden)
        hidden = hidden + self.attention(seen, seen, seen, need_weights=False)[0]
        added: Tensor = self.down(nn.functional.gelu(self.up(self.after(hidden))))
        return hidden + added


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int = 2048, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


def build_model() -> nn.Module:
    """What `ds_plan` looks for."""
    return Decoder()


def example_batch(batch: int, sequence: int | None) -> tuple[Tensor, Tensor]:
    """Tokens and labels of so many samples."""
    tokens = torch.randint(VOCABULARY, (batch, sequence or LENGTH))
    return tokens, tokens
