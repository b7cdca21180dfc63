"""The `compression_training` section: quantisation, pruning and layer reduction while training."""

from __future__ import annotations

from pydantic import Field, model_validator

from .model import PositiveCount, Section
from .prune import ChannelPruningConfig, HeadPruningConfig, RowPruningConfig, SparsePruningConfig
from .quantize import ActivationQuantizationConfig, WeightQuantizationConfig
from .values import absent, raise_together

__all__ = ["CompressionConfig", "LayerReductionConfig"]


class LayerReductionConfig(Section):
    """A student with fewer layers, which starts from chosen layers of a teacher."""

    enabled: bool = Field(False, description="Whether layers are copied from the teacher model.")
    keep_number_layer: PositiveCount | None = Field(None, description="Number of layers of the student.")
    module_name_prefix: str | None = Field(None, description="Module path in front of the layer number.")
    teacher_layer: list[int] | None = Field(None, description="Layer of the teacher for each layer of the student.")
    other_module_name: list[str] | None = Field(None, description="Modules outside the layers that are copied too.")

    @model_validator(mode="after")
    def _rules(self) -> LayerReductionConfig:
        if self.enabled:
            missing = absent(self, ("module_name_prefix", "teacher_layer"))
            raise_together([f"{key} must be given when layer_reduction is enabled" for key in missing])
        return self


class CompressionConfig(Section):
    """Techniques that `deepspeed.compression.init_compression` applies to a model."""

    weight_quantization: WeightQuantizationConfig = Field(
        default_factory=WeightQuantizationConfig, description="Weights in fewer bits, step by step."
    )
    activation_quantization: ActivationQuantizationConfig = Field(
        default_factory=ActivationQuantizationConfig, description="Activations in fewer bits."
    )
    sparse_pruning: SparsePruningConfig = Field(
        default_factory=SparsePruningConfig, description="Single weights or blocks of weights set to zero."
    )
    row_pruning: RowPruningConfig = Field(
        default_factory=RowPruningConfig, description="Whole rows of linear weights removed."
    )
    head_pruning: HeadPruningConfig = Field(
        default_factory=HeadPruningConfig, description="Whole attention heads removed."
    )
    channel_pruning: ChannelPruningConfig = Field(
        default_factory=ChannelPruningConfig, description="Whole channels of convolutions removed."
    )
    layer_reduction: LayerReductionConfig = Field(
        default_factory=LayerReductionConfig, description="Fewer layers, copied from a teacher."
    )
