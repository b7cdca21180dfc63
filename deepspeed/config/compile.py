"""The `compile`, `fused_kernels`, `fp8` and `hybrid_engine` sections: what the layers of a model run on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from .model import NoEffect, NotBuilt, Patterns, PositiveCount, Section, key

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


def _stays_whole(schema: Any) -> bool:
    """Whether a hybrid engine's parameters are whole between uses."""
    return schema.hybrid_engine.enabled and not schema.zero_optimization.shards_parameters


class HybridEngineConfig(Section):
    """One engine that trains and generates."""

    enabled: bool = key(False, "Whether deepspeed.initialize returns a DeepSpeedHybridEngine.")
    max_out_tokens: PositiveCount = key(512, "Number of tokens of a sequence that the cache holds, prompt included.")
    inference_tp_size: PositiveCount = key(
        1,
        "Number of ranks that share every layer while the engine generates (stage 3).",
        NoEffect("zero_optimization.stage is below 3: every rank generates with its whole parameters", _stays_whole),
    )
    release_inference_cache: bool = key(
        False, "Whether keys, values and graphs are freed after each generate(), not kept for the next one."
    )
    pin_parameters: bool = key(
        True,
        "Whether parameters stay whole between calls of generate() in eval mode (stage 3), until training goes on.",
        NoEffect("zero_optimization.stage is below 3: parameters are always whole", _stays_whole),
    )
    tp_gather_partition_size: PositiveCount = key(
        8,
        "Number of layers whose parameters are gathered at once for generation (stage 3).",
        NoEffect("zero_optimization.stage is below 3: no parameter is gathered", _stays_whole),
    )
    enable_cuda_graph: bool = key(False, "Whether steps of generation are captured as graphs of the device.")
    offload_states: bool = key(
        False, "Whether optimizer states and masters wait in host memory while the engine generates."
    )
