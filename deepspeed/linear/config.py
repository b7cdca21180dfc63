"""`LoRAConfig` and `QuantizationConfig`: what is asked of a linear layer; values that cannot be are refused at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed.comm.codec import BlockCodec, block_codec
from deepspeed.errors import UsageError
from deepspeed.ops.codecs.formats import FORMATS
from deepspeed.ops.fp_quantizer.quantize import float_format

__all__ = ["LoRAConfig", "QuantizationConfig"]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that get adapters if nobody says which."""

_INTEGERS = {8: "int8", 4: "int4"}


@dataclass
class LoRAConfig:
    """Adapters beside a frozen weight: `y = W x + (lora_alpha / lora_r) B A x`."""

    lora_r: int = 64
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    """Ranks that share one frozen weight; they are neighbours. 1: each layer has a parameter, as ZeRO spreads it."""
    offload: bool = False
    """Frozen weights may rest in host memory; `offload_ratio` says how many."""
    offload_ratio: float = 0.0
    """Share of the elements of all frozen weights that rests in host memory; the last layers."""
    delay_lora_init: bool = False
    """Layers stay plain and frozen until `init_lora`, so that weights can be loaded into them."""
    target_mods: list[str] = field(default_factory=lambda: list(TARGETS))
    """Parts of the names of layers that get adapters."""

    def __post_init__(self) -> None:
        if self.lora_r < 1:
            raise UsageError(f"LoRAConfig: lora_r is {self.lora_r}, the rank of adapters; expected 1 or more")
        if self.base_weight_sharding < 1:
            raise UsageError(
                f"LoRAConfig: base_weight_sharding is {self.base_weight_sharding}, a number of ranks; expected 1 or "
                "more"
            )
        if self.offload and not 0 < self.offload_ratio <= 1:
            raise UsageError(
                f"LoRAConfig: offload is true and offload_ratio is {self.offload_ratio}; expected a share in (0, 1], "
                "1.0 for all frozen weights"
            )
        if not self.offload and self.offload_ratio:
            raise UsageError(
                f"LoRAConfig: offload_ratio is {self.offload_ratio} and offload is false; set offload to true"
            )


@dataclass
class LinearQuantization:
    """How a frozen weight is rounded; groups of neighbouring elements share a scale."""

    q_bits: int = 8
    """12, 8, 6 or 4 for small floats; 8 or 4 for integers."""
    mantissa_bits: int = 3
    """Of floats of 8 bits: 3 or 2. The other widths have one form, and integers have none."""
    group_size: int = 512
    """Elements that share a scale; it has to divide what a rank holds of a weight."""
    q_dtype: torch.dtype = torch.uint8
    """torch.uint8 for small floats in bytes, torch.int8 for integers."""

    def __post_init__(self) -> None:
        lanes = FORMATS[self.form].lanes
        if self.group_size < 1 or self.group_size % lanes:
            raise UsageError(
                f"QuantizationConfig: group_size is {self.group_size}; expected a multiple of {lanes}, since as many "
                f"codes of {self.q_bits} bits share bytes"
            )

    @property
    def form(self) -> str:
        """The name of the codes' format."""
        if self.q_dtype == torch.uint8:
            return float_format(self.q_bits, self.mantissa_bits, "QuantizationConfig")
        if self.q_dtype != torch.int8 or self.q_bits not in _INTEGERS:
            raise UsageError(
                f"QuantizationConfig: q_bits is {self.q_bits} and q_dtype {self.q_dtype}; expected torch.uint8 for "
                "small floats of 12, 8, 6 or 4 bits, or torch.int8 for integers of 8 or 4"
            )
        return _INTEGERS[self.q_bits]

    @property
    def codec(self) -> BlockCodec:
        """What encodes weights."""
        return block_codec(self.form, self.group_size)


QuantizationConfig = LinearQuantization
"""Its published name."""
