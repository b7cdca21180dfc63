"""The `compile`, `fused_kernels`, `fp8` and `hybrid_engine` sections: what the layers of a model run on."""

from __future__ import annotations

from typing import Any, Literal

from .model import NoEffect, NotBuilt, Patterns, PositiveCount, Section, key, no_effect

__all__ = ["CompileConfig"]


class CompileConfig(Section):
    """torch.compile by engine.compile(), plain or as DeepCompile."""

    @property
    def enabled(self) -> bool:
        """Whether keys ask for anything: all but `region` are those of DeepCompile."""
        return self.deepcompile

    deepcompile: bool = key(
        False,
        "Whether engine.compile() uses DeepCompile: gathers and reductions of ZeRO become operations of the graphs.",
    )
    region: Literal["auto", "blocks", "model"] = key(
        "auto",
        "What engine.compile() compiles: the repeated blocks of the model, or all of it; auto takes the blocks where "
        "there are some, and all of it with deepcompile.",
    )
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None,
        "What is compiled: autosp shares sequences over sequence_parallel_size ranks by Ulysses, autotp layers over "
        "tensor_parallel.autotp_size; z1 and z3 change nothing, as the ZeRO stage decides.",
    )
    debug_log: bool = key(False, "Whether the graphs are logged as the passes leave them.")
    sync_before_reduce: bool = key(False, "Whether the device is waited for before a gradient is handed over.")
    sync_after_reduce: bool = key(False, "Whether the device is waited for after a gradient is handed over.")
    sync_before_allgather: bool = key(False, "Whether the device is waited for before a gather begins.")
    sync_after_allgather: bool = key(False, "Whether the device is waited for after a gather.")
    double_buffer: bool = key(
        True,
        "Whether a bucket of gradients is packed while another one travels.",
        NotBuilt("one bucket at a time under DeepCompile", lambda value: not value, instead="leave the key at true"),
    )
    autoep_non_moe: bool = key(
        False,
        "Whether only what surrounds AutoEP layers is compiled.",
        NotBuilt("compilation around AutoEP layers"),
    )
    free_activation: bool = key(
        False,
        "Whether the backend eager frees large activations after their last use in backward; inductor always does.",
    )
    free_activation_threshold: PositiveCount = key(
        10 << 20,
        "Bytes from which an activation is large.",
        NoEffect("compile.free_activation is off", lambda c: not c.compile.free_activation),
    )
    offload_activation: bool = key(
        False, "Whether activations of 5 MiB and more that are saved for backward wait in host memory."
    )
    offload_activation_pin_memory: bool = key(
        True,
        "Whether that memory is pinned.",
        NoEffect("compile.offload_activation is off", lambda c: not c.compile.offload_activation),
    )
    offload_opt_states: bool = key(
        False,
        "Whether optimizer states wait in host memory during forward and backward, as far as activations need room.",
    )
    offload_parameters: bool = key(
        False, "Whether parameters wait in host memory, as by zero_optimization.offload_param."
    )
    symmetric_memory: bool = key(
        False, "Whether gathers use symmetric memory.", NotBuilt("symmetric memory under DeepCompile")
    )
    keep_int_input_tensors: bool = no_effect(True, "passes do not run graphs to measure them, so no input is kept")
    keep_all_input_tensors: bool = no_effect(False, "passes do not run graphs to measure them, so no input is kept")


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
    scaling: Literal["tensor", "row", "block", "auto"] = key(
        "tensor",
        "What has a scale of its own: a tensor, a row, or 128 numbers of it (of weights, squares of 128 × 128); "
        "auto: the most exact within 5 % of the fastest, as measured.",
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
