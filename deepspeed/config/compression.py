"""Quantisation, pruning and layer reduction while training: `compression_training`, and what was before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from annotated_types import Gt, Le, Lt
from pydantic import ConfigDict, Field, model_validator

from .model import Count, PositiveCount, Section, Share
from .values import Names, Number, Patterns, absent, raise_together

__all__ = [
    "CompressionConfig",
    "EigenvalueConfig",
    "LayerReductionConfig",
    "QuantizeTrainingConfig",
    "WeightQuantizationConfig",
]

DenseRatio = Annotated[Number, Gt(0), Le(1)]
"""Share of the weights that is kept."""


class SharedConfig(Section):
    """What every technique's `shared_parameters` have."""

    enabled: bool = Field(False, description="Whether the technique is applied.")
    schedule_offset: Count = Field(1000, description="Optimizer step at which the technique begins.")


class GroupConfig(Section):
    """Modules that are treated alike; subclasses add the parameters."""

    modules: Patterns = Field(["*"], description='Regular expressions searched in module names; "*" is every module.')
    related_modules: list[Patterns] | None = Field(
        None, description="For each entry of modules, the neighbours whose size shrinks with it."
    )


def group_problems(name: str, params: Mapping[str, Section], required: Sequence[str]) -> list[str]:
    """What the groups of an enabled technique lack; `params` maps each group's name to its parameters."""
    if not params:
        return [f"different_groups must name at least one group when {name} is enabled"]
    return [
        f"different_groups.{group}.params.{key} must be given when {name} is enabled"
        for group, values in params.items()
        for key in absent(values, required)
    ]


class MixedQuantizeConfig(Section):
    """A blend of quantised and original weights that moves to the quantised ones."""

    enabled: bool = Field(False, description="Whether the two are blended.")
    quantize_change_ratio: Share = Field(
        0.001, description="Share by which the original weights lose per step (0 to 1)."
    )


class WeightQuantizationShared(SharedConfig):
    """What all groups of quantised weights share."""

    schedule_offset: Count = Field(0, description="Optimizer step at which the technique begins.")
    quantizer_kernel: bool = Field(False, description="Whether a fused kernel quantises the weights.")
    quantize_groups: PositiveCount = Field(1, description="Number of parts of a weight with a scale of their own.")
    quantize_verbose: bool = Field(False, description="Whether changes of the number of bits are logged.")
    quantization_type: Literal["symmetric", "asymmetric"] = Field(
        "symmetric", description="Whether the range lies around zero or between the smallest and largest weight."
    )
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="How values between steps are rounded.")
    quantize_weight_in_forward: bool = Field(
        False, description="Whether weights are quantised in each forward; false, in the optimizer step, needs fp16."
    )
    fp16_mixed_quantize: MixedQuantizeConfig = Field(
        default_factory=MixedQuantizeConfig, description="A blend of quantised and original weights."
    )


class WeightQuantizationParams(Section):
    """Bits of one group of weights."""

    start_bits: PositiveCount | None = Field(None, description="Bits per weight at the beginning.")
    target_bits: PositiveCount | None = Field(None, description="Bits per weight in the end.")
    quantization_period: PositiveCount = Field(
        1, description="Number of steps until the first bit is dropped; doubles with each bit."
    )


class WeightQuantizationGroup(GroupConfig):
    """One group of weights."""

    params: WeightQuantizationParams = Field(
        default_factory=WeightQuantizationParams, description="Bits of this group."
    )


class WeightQuantizationConfig(Section):
    """Weights in fewer bits."""

    shared_parameters: WeightQuantizationShared = Field(
        default_factory=WeightQuantizationShared, description="What all groups share."
    )
    different_groups: dict[str, WeightQuantizationGroup] = Field(
        {}, description="Name of a group -> its modules and bits."
    )

    @model_validator(mode="after")
    def _rules(self) -> WeightQuantizationConfig:
        shared = self.shared_parameters
        if not shared.enabled:
            return self
        params = {name: group.params for name, group in self.different_groups.items()}
        problems = group_problems("weight_quantization", params, ("start_bits", "target_bits"))
        plain = shared.quantization_type == "symmetric" and shared.rounding == "nearest"
        for name, values in params.items():
            bits = values.target_bits
            if bits is not None and bits <= 2 and not plain:
                problems.append(
                    f"different_groups.{name}.params.target_bits {bits} needs quantization_type symmetric and "
                    f"rounding nearest, found {shared.quantization_type} and {shared.rounding}"
                )
        raise_together(problems)
        return self


class ActivationQuantizationShared(SharedConfig):
    """What all groups of quantised activations share."""

    quantization_type: Literal["symmetric", "asymmetric"] = Field(
        "symmetric", description="Whether the range lies around zero or between the smallest and largest value."
    )
    range_calibration: Literal["dynamic", "static"] = Field(
        "dynamic", description="Whether the range is found anew for each batch or kept from earlier ones."
    )


class ActivationQuantizationParams(Section):
    """Bits of one group of activations."""

    bits: PositiveCount | None = Field(None, description="Bits per activation.")


class ActivationQuantizationGroup(GroupConfig):
    """One group of activations."""

    params: ActivationQuantizationParams = Field(
        default_factory=ActivationQuantizationParams, description="Bits of this group."
    )


class ActivationQuantizationConfig(Section):
    """Activations in fewer bits."""

    shared_parameters: ActivationQuantizationShared = Field(
        default_factory=ActivationQuantizationShared, description="What all groups share."
    )
    different_groups: dict[str, ActivationQuantizationGroup] = Field(
        {}, description="Name of a group -> its modules and bits."
    )

    @model_validator(mode="after")
    def _rules(self) -> ActivationQuantizationConfig:
        if self.shared_parameters.enabled:
            params = {name: group.params for name, group in self.different_groups.items()}
            raise_together(group_problems("activation_quantization", params, ("bits",)))
        return self


class PruningParams(Section):
    """How much of one group is kept."""

    dense_ratio: DenseRatio | None = Field(None, description="Share that is kept (above 0, up to 1).")


class PruningGroup(GroupConfig):
    """One group of pruned modules."""

    params: PruningParams = Field(default_factory=PruningParams, description="How much of this group is kept.")


_Groups = dict[str, PruningGroup]


def _pruning_problems(name: str, groups: _Groups) -> list[str]:
    return group_problems(name, {key: group.params for key, group in groups.items()}, ("dense_ratio",))


class PruningShared(SharedConfig):
    """What all groups of pruned rows or channels share."""

    method: Literal["l1", "topk"] = Field(
        "l1", description="l1 keeps what has the largest norm, topk learns what to keep."
    )


class SparsePruningShared(SharedConfig):
    """What all groups of sparsely pruned weights share."""

    method: Literal["l1", "topk", "snip_momentum"] = Field(
        "l1", description="l1 keeps the largest weights, topk learns them, snip_momentum prunes block by block."
    )
    block_pattern: str = Field("4x1", description="Rows x columns of the blocks (snip_momentum).")
    dense_ratio: Annotated[DenseRatio, Lt(1)] = Field(
        0.1, description="Share that is kept in the end (above 0, below 1; snip_momentum)."
    )
    schedule_offset_stride: PositiveCount = Field(
        1, description="Number of steps between two prunings (snip_momentum)."
    )
    schedule_offset_end: Count | None = Field(
        None, description="Optimizer step of the last pruning; null means schedule_offset (snip_momentum)."
    )
    excluded_modules: Names = Field([], description="Modules that are left alone (snip_momentum).")

    @model_validator(mode="after")
    def _rules(self) -> SparsePruningShared:
        end = self.schedule_offset_end
        if self.enabled and end is not None and end < self.schedule_offset:
            raise ValueError(f"schedule_offset_end ({end}) lies before schedule_offset ({self.schedule_offset})")
        return self


class HeadPruningShared(SharedConfig):
    """What all groups of pruned heads share."""

    method: Literal["topk", "l1"] = Field(
        "topk", description="topk learns which heads to keep; l1 does not exist for heads."
    )
    num_heads: PositiveCount | None = Field(None, description="Number of attention heads; must be given when enabled.")

    @model_validator(mode="after")
    def _rules(self) -> HeadPruningShared:
        if self.enabled:
            problems = []
            if self.num_heads is None:
                problems.append("num_heads must be given when head_pruning is enabled")
            if self.method == "l1":
                problems.append('method "l1" does not exist for heads; use "topk"')
            raise_together(problems)
        return self


class SparsePruningConfig(Section):
    """Single weights or blocks of weights set to zero."""

    shared_parameters: SparsePruningShared = Field(
        default_factory=SparsePruningShared, description="What all groups share."
    )
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> SparsePruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("sparse_pruning", self.different_groups))
        return self


class RowPruningConfig(Section):
    """Whole rows of linear weights removed."""

    shared_parameters: PruningShared = Field(default_factory=PruningShared, description="What all groups share.")
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> RowPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("row_pruning", self.different_groups))
        return self


class HeadPruningConfig(Section):
    """Whole attention heads removed."""

    shared_parameters: HeadPruningShared = Field(
        default_factory=HeadPruningShared, description="What all groups share."
    )
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> HeadPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("head_pruning", self.different_groups))
        return self


class ChannelPruningConfig(Section):
    """Whole channels of convolutions removed."""

    shared_parameters: PruningShared = Field(default_factory=PruningShared, description="What all groups share.")
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> ChannelPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("channel_pruning", self.different_groups))
        return self


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


class EigenvalueConfig(Section):
    """Curvature per layer, by power iteration, for the pace of weight quantisation."""

    enabled: bool = Field(False, description="Whether the largest eigenvalue of each layer's Hessian is computed.")
    verbose: bool = Field(False, description="Whether the iterations are logged.")
    max_iter: PositiveCount = Field(100, description="Number of iterations, at most.")
    tol: Annotated[Number, Gt(0)] = Field(1e-2, description="Relative change at which the iteration stops.")
    stability: Annotated[Number, Gt(0)] = Field(1e-6, description="Number added to divisors against division by 0.")
    gas_boundary_resolution: PositiveCount = Field(1, description="Number of optimizer steps between two computations.")
    layer_name: str = Field("bert.encoder.layer", description="Module path of the list of layers.")
    layer_num: Count = Field(0, description="Number of layers in it.")


class QuantizeTrainingConfig(Section):
    """The first form of quantised training, which compression_training.weight_quantization replaces."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = Field(
        False, description="Whether this form is wanted; use compression_training.weight_quantization instead."
    )
    eigenvalue: EigenvalueConfig = Field(
        default_factory=EigenvalueConfig, description="Curvature per layer, as in the section of that name."
    )
