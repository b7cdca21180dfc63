"""The `fused_kernels` section: modules of a model that run on fused kernels."""

from __future__ import annotations

from pydantic import Field

from .model import Count, Section
from .values import Patterns

__all__ = ["FusedKernelsConfig"]


class FusedKernelsConfig(Section):
    """Which modules are recognised by what they compute and run on kernels that touch memory less often."""

    enabled: bool = Field(
        False, description="Whether modules are replaced; a table tells which, and why others are not."
    )
    norm: bool = Field(True, description="RMSNorm and LayerNorm.")
    rotary: bool = Field(True, description="Rotary position embedding in attention modules.")
    mlp: bool = Field(
        True, description="The activation of feed-forward layers: SwiGLU, GeGLU, and GELU with the bias before it."
    )
    loss: bool = Field(
        True, description="The last projection of causal language models with its loss; logits are never whole."
    )
    inputs: bool = Field(
        True,
        description="Linear layers that read one input, as queries, keys and values do: its gradient is summed by "
        "their products.",
    )
    mask: bool = Field(
        True,
        description="Causal masks of Transformers' models: the device is not asked whether sequences are packed where "
        "the model counts positions itself.",
    )
    exclude: Patterns = Field([], description="Regular expressions, matched from the start of module names to leave.")
    compile_processes: Count = Field(
        16,
        description="How many processes beside each rank may compile kernels ahead, at most one for each further core; "
        "0 lets threads of the rank do it.",
    )
