"""Which way round stacked weights lie in which gate and up are one, told by their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FusedExpertLayout", "FusedLayout", "classify_fused_gate_up_layout"]

FusedLayout = Literal["out_in", "in_out"]
"""[experts, outputs, inputs], as linear layers keep weights, or [experts, inputs, outputs]."""


@dataclass(frozen=True)
class FusedExpertLayout:
    """How gate and up lie, and how wide the experts are."""

    layout: FusedLayout
    hidden_size: int
    ffn_hidden_size: int
    """Of the gate, or of the up projection: half of both."""
    needs_transpose: bool
    """True unless weights lie as those of linear layers do."""


def classify_fused_gate_up_layout(w1_shape: tuple[int, ...], w2_shape: tuple[int, ...]) -> FusedExpertLayout | None:
    """The layout of gate and up (w1) and down (w2), both [experts, …, …]; None if they fit in neither way."""
    if len(w1_shape) != 3 or len(w2_shape) != 3 or w1_shape[0] != w2_shape[0] or not all((*w1_shape, *w2_shape)):
        return None
    (_, rows, columns), (_, down_rows, down_columns) = w1_shape, w2_shape
    if columns == down_rows and rows == 2 * down_columns:
        return FusedExpertLayout("out_in", columns, down_columns, needs_transpose=False)
    if rows == down_columns and columns == 2 * down_rows:
        return FusedExpertLayout("in_out", rows, down_rows, needs_transpose=True)
    return None
