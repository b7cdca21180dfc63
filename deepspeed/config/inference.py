"""The `weight_quantization` and `hybrid_engine` sections: a trained or training model that generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from .model import PositiveCount, Section
from .values import Whole

__all__ = ["HybridEngineConfig", "QuantizedWeightConfig", "WeightQuantConfig"]


class QuantizedWeightConfig(Section):
    """How one set of weights is quantised."""

    num_bits: Literal[4, 8] = Field(description="Bits per weight: 4 or 8.")
    group_size: PositiveCount = Field(
        description="Number of neighbouring elements that share a scale; must divide the size of group_dim."
    )
    group_dim: Whole = Field(description="Dimension of the weight along which the groups lie.")
    symmetric: bool = Field(False, description="Must be false: only asymmetric quantisation exists here.")

    @field_validator("symmetric", mode="after")
    @classmethod
    def _asymmetric(cls, value: bool) -> bool:
        if value:
            raise ValueError("expected false, found true: only asymmetric quantisation exists here")
        return value


def _none_if_empty(value: Any) -> Any:
    return None if value == {} else value


class WeightQuantConfig(Section):
    """Weight-only quantisation of a model that is too large otherwise."""

    quantized_initialization: Annotated[QuantizedWeightConfig | None, BeforeValidator(_none_if_empty)] = Field(
        None, description="How zero.Init quantises linear and embedding weights as they are made; null is off."
    )
    post_init_quant: dict[str, QuantizedWeightConfig] = Field(
        {}, description="Part of a module's name -> how its weights are quantised after loading."
    )
    enabled: bool = Field(True, description="No effect: the two blocks above say what is quantised.")
    num_bits: PositiveCount = Field(8, description="No effect: each block says its own number of bits.")
    q_type: Literal["symmetric", "asymmetric"] = Field(
        "symmetric", description="No effect: quantisation is asymmetric."
    )
    q_groups: PositiveCount = Field(1, description="No effect: each block says its own group size.")


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
