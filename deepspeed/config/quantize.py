"""Quantisation in `compression_training`, and the older `eigenvalue` and `quantize_training` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import ConfigDict, Field, model_validator

from .model import Count, PositiveCount, Section, Share
from .technique import GroupConfig, SharedConfig, group_problems
from .values import Number, raise_together

__all__ = [
    "ActivationQuantizationConfig",
    "ActivationQuantizationGroup",
    "ActivationQuantizationParams",
    "ActivationQuantizationShared",
    "EigenvalueConfig",
    "MixedQuantizeConfig",
    "QuantizeTrainingConfig",
    "WeightQuantizationConfig",
    "WeightQuantizationGroup",
    "WeightQuantizationParams",
    "WeightQuantizationShared",
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
