"""Gated feed-forward layers whose three products are of 8 bits, computed as one: each part knows what the next asks.

The layers stay where they are. Whenever one of them is not as it was found, is watched by a hook or has its parameters
elsewhere, they are called one after the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.feed_forward import APART, FeedForward
from deepspeed.fusion.layers import fits, ordinary, watched_everywhere
from deepspeed.fusion.products import Products, Recent, products_of
from deepspeed.fusion.swap import TOKENS, Swap, put_forward, replacement
from deepspeed.ops.fp8.feed_forward import Fp8FeedForward
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["FeedForward8", "find_feed_forward8"]


def find_feed_forward8(module: nn.Module) -> Swap | None:
    """How a feed-forward layer is computed as one, whose activation and products were replaced before; else None."""
    before = replacement(module)
    fused = getattr(before, "__self__", None)
    if before is None or not isinstance(fused, FeedForward) or before.__func__ is not FeedForward.apart:  # type: ignore[attr-defined]
        return None
    layers = _layers(module)
    if layers is None:
        return None
    gate, _, down = layers
    run = FeedForward8(fused)
    scene = partial(_scene, fused.kind, gate.in_features, gate.out_features, down.out_features)
    return Swap(f"gated {fused.kind} between products", partial(put_forward, module, run.run), scene)


class FeedForward8:
    """One feed-forward layer."""

    def __init__(self, apart: FeedForward) -> None:
        self._apart = apart

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        layers = None if watched_everywhere() or not ordinary(x) or not x.numel() else _layers(module)
        if layers is None or not all(
            fits(layer, x, width) for layer, width in zip(layers, (None, None, layers[0].out_features), strict=True)
        ):
            return self._apart.apart(module, *args, **kwargs)
        products = products_of(layers[0])
        assert products is not None, "looked at"
        return compute(products, x, self._apart.kind, *(layer.weight for layer in layers))


def compute(products: Products, x: Tensor, kind: str, *weights: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x)) for the three weights."""

    def of_rows(matrix: Tensor) -> list[Tensor]:
        return [Fp8FeedForward.apply(matrix, products.recent.rounded(x, matrix), kind, *weights)]  # type: ignore[no-untyped-call]

    return products.of_rows(x, of_rows)[0]


def _layers(module: nn.Module) -> list[nn.Linear] | None:
    """Gate, up and down, if they can be computed as one."""
    found = [module._modules.get(name) for name in APART]
    layers = [layer for layer in found if isinstance(layer, nn.Linear) and products_of(layer) is not None]
    if len(layers) < len(APART) or any(layer.bias is not None for layer in layers):
        return None
    gate, up, down = layers
    matching = (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
    return layers if matching and gate is not up and down.in_features == gate.out_features else None


def _scene(kind: str, width: int, inner: int, out: int, *, dtype: torch.dtype) -> None:
    products = Products(Recent(by_rows=False))  # its own: other threads are using the model's
    shapes = (TOKENS, width), (inner, width), (inner, width), (out, inner)
    forth_and_back(lambda x, *weights: compute(products, x, kind, *weights), *shapes, dtype=dtype)
