"""The `compile`, `fused_kernels` and `fp8` sections: what the layers of a model run on."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from .model import NotBuilt, Patterns, Section, key

__all__ = ["CompileConfig"]


class CompileConfig(Section):
    """torch.compile by engine.compile(); the keys of DeepCompile are taken and not read."""

    model_config = ConfigDict(extra="allow")

    deepcompile: bool = key(
        False, "Whether engine.compile() uses DeepCompile instead of plain torch.compile.", NotBuilt("DeepCompile")
    )
    region: Literal["auto", "blocks", "model"] = key(
        "auto",
        "What engine.compile() compiles: the repeated blocks of the model, or all of it; auto takes the blocks where "
        "there are some.",
    )


class FusedKernelsConfig(Section):
    """Which modules are recognised by what they compute and run on kernels that touch memory less often."""

    enabled: bool = key(False, "Whether modules are replaced; a table lists which, and why others are not.")
    norm: bool = key(True, "RMSNorm and LayerNorm.")
    rotary: bool = key(True, "Rotary position embedding in attention modules.")
    mlp: bool = key(True, "The activation of feed-forward layers: SwiGLU, GeGLU, and GELU with the bias before it.")
    loss: bool = key(True, "The last projection of causal language models with its loss; logits are never whole.")
    inputs: bool = key(
        True,
        "Linear layers that read one input, as queries, keys and values do: its gradient is summed by their products.",
    )
    mask: bool = key(
        True,
        "Causal masks of Transformers' models: the device is not asked whether sequences are packed where the model "
        "counts positions itself.",
    )
    exclude: Patterns = key([], "Regular expressions, matched from the start of module names to leave.")


class Fp8Config(Section):
    """Which linear layers multiply 8-bit numbers; weights, gradients and everything else keep their precision."""

    enabled: bool = key(
        False, "Whether linear layers round what they multiply; a table lists which, and why others do not."
    )
    scaling: Literal["tensor", "row"] = key(
        "tensor", "A scale for each tensor, or for each row, which is nearer and leaves gradients of weights alone."
    )
    exclude: Patterns = key(
        ["lm_head", ".*embed"], "Regular expressions, matched from the start of module names to leave."
    )
