"""The `compile`, `fused_kernels` and `fp8` sections: what the layers of a model run on."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .model import Count, NoEffect, NotBuilt, Patterns, Section, key, raise_together

__all__ = ["CompileConfig"]

_DEEPCOMPILE = NoEffect("it belongs to compile.deepcompile, which is off", lambda c: not c.compile.deepcompile)


class CompileConfig(Section):
    """torch.compile with ZeRO inside the graph (DeepCompile)."""

    deepcompile: bool = key(
        False, "Whether engine.compile() uses DeepCompile instead of plain torch.compile.", NotBuilt("DeepCompile")
    )
    region: Literal["auto", "blocks", "model"] = key(
        "auto",
        "What engine.compile() compiles: the repeated blocks of the model, or all of it; auto takes the blocks where "
        "there are some.",
    )
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None,
        "Graph passes: autosp (sequence parallel) or autotp (tensor parallel); z1 and z3 follow the ZeRO stage anyway "
        "and have no effect of their own.",
        _DEEPCOMPILE,
    )
    autoep_non_moe: bool = key(
        False, "Whether only the parts around automatic expert-parallel layers are compiled.", _DEEPCOMPILE
    )
    free_activation: bool = key(
        False, "Whether large activations are freed early; the inductor backend does so by itself.", _DEEPCOMPILE
    )
    free_activation_threshold: Count = key(
        10_485_760, "Size from which an activation counts as large, in bytes.", _DEEPCOMPILE
    )
    offload_activation: bool = key(
        False, "Whether saved activations of 5 MiB and more are moved to host memory.", _DEEPCOMPILE
    )
    offload_activation_pin_memory: bool = key(
        True, "Whether the host buffers for activations are page-locked.", _DEEPCOMPILE
    )
    offload_opt_states: bool = key(
        False, "Whether optimizer state leaves the device during forward and backward (stage 3).", _DEEPCOMPILE
    )
    offload_parameters: bool = key(
        False, "Whether parameters are offloaded; implied when ZeRO offloads parameters and optimizer.", _DEEPCOMPILE
    )
    double_buffer: bool = key(True, "Whether two reduction buckets take turns.", _DEEPCOMPILE)
    symmetric_memory: bool = key(
        False, "Whether collectives use symmetric memory between GPUs (stage 3).", _DEEPCOMPILE
    )
    keep_int_input_tensors: bool = key(
        True, "Whether integer inputs keep their real values while a graph is profiled.", _DEEPCOMPILE
    )
    keep_all_input_tensors: bool = key(
        False, "Whether all inputs keep their real values while a graph is profiled.", _DEEPCOMPILE
    )
    debug_log: bool = key(False, "Whether the graphs are written out.", _DEEPCOMPILE)
    sync_before_reduce: bool = key(
        False, "Whether the device is synchronised before each reduction, for debugging.", _DEEPCOMPILE
    )
    sync_after_reduce: bool = key(
        False, "Whether the device is synchronised after each reduction, for debugging.", _DEEPCOMPILE
    )
    sync_before_allgather: bool = key(
        False, "Whether the device is synchronised before each gather, for debugging.", _DEEPCOMPILE
    )
    sync_after_allgather: bool = key(
        False, "Whether the device is synchronised after each gather, for debugging.", _DEEPCOMPILE
    )

    @model_validator(mode="after")
    def _rules(self) -> CompileConfig:
        problems = []
        offloads = [
            key for key in ("offload_activation", "offload_opt_states", "offload_parameters") if getattr(self, key)
        ]
        if len(offloads) > 1:
            problems.append(f"{' and '.join(offloads)} exclude each other; keep one")
        others = [name for name in self.passes or () if name != "autotp"]
        if self.passes and "autotp" in self.passes and others:
            problems.append(f"passes: autotp cannot be combined with {', '.join(others)}")
        if self.autoep_non_moe and self.deepcompile:
            problems.append("autoep_non_moe and deepcompile exclude each other; keep one")
        raise_together(problems)
        return self


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
