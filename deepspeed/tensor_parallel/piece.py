"""`Piece`: what of a model whose layers are spread over ranks lies here, for those who split layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Piece"]


@dataclass(frozen=True)
class Piece:
    """Some layers of a model; the others are on other ranks."""

    owner: nn.Module
    """The module whose forward computes logits and loss, with what of it lies here."""
    blocks: tuple[nn.Module, ...] = ()
    """The blocks that lie here, in order."""
    first: nn.Module | None = None
    """The model's first block; None where it lies elsewhere."""
    last: nn.Module | None = None
    """Its last block, likewise."""
    tied: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Id of a weight that lies here → the paths of layers elsewhere that share it."""
