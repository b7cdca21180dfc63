"""Small enumerations that model descriptions share."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ActivationFuncType"]


class ActivationFuncType(IntEnum):
    """The activation of a feed-forward block."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4
