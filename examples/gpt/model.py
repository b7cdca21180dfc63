"""A small GPT: tokens in, logits out, and the loss if the next tokens are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128


def rotations(length: int, size: int) -> Tensor:
    """Cosines and sines [2, length, size / 2] that turn pairs of numbers by an angle which grows with their place."""
    speeds = 1000.0 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length), speeds)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Tell heads [..., length, size] where they are: two that are turned meet at the angle of their distance."""
    cos, sin = rotation[:, : x.shape[-2]].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary places."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.register_buffer("rotation", rotations(shape.context, shape.width // shape.heads), persistent=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What the blocks add to the stream keeps its size, however many they are.
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: Tensor, following: Tensor | None = None) -> Tensor:
        """The mean loss of predicting `following`, or, without it, the logits of what follows each token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = F.linear(self.norm(x), self.tokens.weight)  # [batch, length, vocabulary]
        if following is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    @torch.no_grad()
    def continued(
        self, prompt: Tensor, count: int, *, temperature: float, top: int, generator: torch.Generator
    ) -> Tensor:
        """The prompt [length] and `count` tokens more, each drawn from the `top` most likely ones."""
        text = prompt
        for _ in range(count):
            logits = self(text[None, -self.shape.context :])[0, -1].float() / temperature
            likely, ids = logits.topk(min(top, logits.numel()))
            drawn = torch.multinomial(likely.softmax(0).cpu(), 1, generator=generator).to(text.device)
            text = torch.cat((text, ids[drawn]))
        return text
