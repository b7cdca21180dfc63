"""The `weight_quantization` section: weights stored in 8 or 4 bits for inference with ZeRO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from .model import PositiveCount, Section
from .values import Whole

__all__ = ["QuantizedWeightConfig", "WeightQuantConfig"]


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
