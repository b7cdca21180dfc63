"""The `hybrid_engine` section: training and generation with one set of weights."""

from __future__ import annotations

from pydantic import Field

from .model import PositiveCount, Section

__all__ = ["HybridEngineConfig"]


class HybridEngineConfig(Section):
    """The engine for reinforcement learning from feedback: it trains, and generates in between."""

    enabled: bool = Field(False, description="Whether initialize() returns the engine that can also generate.")
    max_out_tokens: PositiveCount = Field(
        512, description="Length for which generation reserves memory, in tokens, prompt included."
    )
    inference_tp_size: PositiveCount = Field(1, description="Number of ranks that share one model in generation.")
    release_inference_cache: bool = Field(
        False, description="Whether the memory for keys and values is freed after each generation."
    )
    pin_parameters: bool = Field(
        True, description="Whether all layers are gathered at once for generation (ZeRO stage 3)."
    )
    tp_gather_partition_size: PositiveCount = Field(
        8, description="Number of layers gathered at a time when generation is tensor-parallel."
    )
    enable_cuda_graph: bool = Field(
        False,
        description="Whether decoding replays CUDA graphs; not with ZeRO stage 3, release_inference_cache or "
        "tensor parallelism.",
    )
