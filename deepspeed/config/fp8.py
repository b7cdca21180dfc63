"""The `fp8` section: matrix products of 8-bit numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .model import Section
from .values import Patterns

__all__ = ["Fp8Config"]


class Fp8Config(Section):
    """Which linear layers multiply 8-bit numbers; weights, gradients and everything else keep their precision."""

    enabled: bool = Field(
        False, description="Whether linear layers round what they multiply; a table tells which, and why others do not."
    )
    scaling: Literal["tensor", "row"] = Field(
        "tensor",
        description="A scale for each tensor, or for each row, which is nearer and leaves gradients of weights alone.",
    )
    exclude: Patterns = Field(
        ["lm_head", ".*embed"],
        description="Regular expressions, matched from the start of module names to leave.",
    )
