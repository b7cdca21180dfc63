"""The section `weight_quantization`: frozen weights that rest in 4 or 8 bits, by groups of neighbouring elements."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from .model import NoEffect, PositiveCount, Section, key, no_effect

_OF_GROUPS = "quantized_initialization and post_init_quant have widths and groups of their own"


class WeightGroups(Section):
    """Width and groups of weights."""

    num_bits: Literal[4, 8] = key(8, "Width of the codes.")
    group_size: PositiveCount = key(128, "Neighbouring elements that share a scale; it divides the dim.")
    group_dim: Literal[0, 1] = key(1, "The dim along which elements are neighbours.")
    symmetric: bool = key(False, "Whether a group has a scale alone; false adds the middle of its range.")

    @model_validator(mode="after")
    def _codes_share_bytes(self) -> WeightGroups:
        if self.num_bits == 4 and self.group_size % 2:
            raise ValueError(
                f"group_size is {self.group_size} with num_bits 4, of which two share a byte; use an even group_size"
            )
        return self


def _absent(value: Any) -> Any:
    return None if value == {} else value


class WeightQuantizationConfig(Section):
    """Frozen weights in few bits, for training beside them or for inference."""

    enabled: bool = key(True, "Whether the section counts.")
    num_bits: Literal[4, 8] = no_effect(8, _OF_GROUPS)
    q_type: Literal["symmetric", "asymmetric"] = no_effect("symmetric", _OF_GROUPS)
    q_groups: PositiveCount = no_effect(1, _OF_GROUPS)
    quantized_initialization: Annotated[WeightGroups | None, BeforeValidator(_absent)] = key(
        None,
        "Linear layers and embeddings that zero.Init builds rest so, frozen (stage 3); null and {} are off.",
        NoEffect("weight_quantization.enabled is false", lambda c: not c.weight_quantization.enabled),
    )
    post_init_quant: dict[str, WeightGroups] = key(
        {},
        "Parts of names → how linear layers and embeddings of the model rest, frozen, from initialize on (any stage).",
        NoEffect("weight_quantization.enabled is false", lambda c: not c.weight_quantization.enabled),
    )

    @property
    def at_birth(self) -> WeightGroups | None:
        """What `zero.Init` does; None: nothing."""
        return self.quantized_initialization if self.enabled else None
