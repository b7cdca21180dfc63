"""A small decoder whose attention a case may replace. Only `measure` of a case imports this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Decoder", "Shape", "attention"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Of 11 million parameters."""

    width: int = 384
    head: int = 48
    inner: int = 1024
    layers: int = 6
    vocabulary: int = 512


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's causal attention over [length, batch, heads, width]."""
    heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)


class _Attention(nn.Module):
    """By heads; how many there are is told by the width of what the projections give."""

    def __init__(self, shape: Shape, attend: Attention) -> None:
        super().__init__()
        self.head, self.attend = shape.head, [attend]  # in a list: what computes is no part of the model
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(shape.width, shape.width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, self.head)
        query, key, value = (getattr(self, name)(x).view(split) for name in ("q_proj", "k_proj", "v_proj"))
        out: Tensor = self.o_proj(self.attend[0](query, key, value).flatten(2))
        return out


class _Perceptron(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Block(nn.Module):
    def __init__(self, shape: Shape, attend: Attention) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attn, self.mlp = _Attention(shape, attend), _Perceptron(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x))
        out: Tensor = x + self.mlp(self.second(x))
        return out


class Decoder(nn.Module):
    """Tokens and targets, [length, batch], to their loss."""

    def __init__(self, shape: Shape, attend: Attention = attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())
