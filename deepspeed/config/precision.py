"""The `fp16`, `bf16`, `torch_autocast` and `data_types` sections: which dtype holds what."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, model_validator

from .model import Count, DtypeName, Names, Number, Section, Whole, key, no_effect, raise_together


class DeepSpeedFP16Config(Section):
    """Training in fp16 with fp32 master weights and loss scaling."""

    enabled: bool = key(False, "Whether to train in fp16, keeping fp32 master weights.")
    auto_cast: bool = key(False, "Whether to cast floating inputs of the model to fp16 in forward.")
    loss_scale: Annotated[Number, Ge(0)] = key(
        0, "Fixed factor on the loss; 0 means a dynamic factor that adapts to overflows."
    )
    initial_scale_power: Annotated[Count, Le(127)] = key(
        16, "The dynamic loss scale starts at 2 to this power; 127 is the largest that fp32 can hold."
    )
    loss_scale_window: Whole = key(
        1000, "Number of optimizer steps without overflow after which the dynamic scale doubles."
    )
    hysteresis: Whole = key(2, "Number of overflows tolerated before the dynamic scale is halved.")
    consecutive_hysteresis: bool = key(False, "Whether every step without overflow refills the hysteresis count.")
    min_loss_scale: Whole = key(1, "Lowest value that the dynamic loss scale may reach.")
    fp16_master_weights_and_grads: bool = key(
        False,
        "Whether master weights and gradients are kept in fp16 instead of fp32 (ZeRO stages 1-3 with "
        "offload_optimizer, whose moments stay fp32).",
    )

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self.loss_scale == 0

    @model_validator(mode="after")
    def _rules(self) -> DeepSpeedFP16Config:
        if self.enabled and self.dynamic:
            limits = {
                "loss_scale_window": self.loss_scale_window,
                "hysteresis": self.hysteresis,
                "min_loss_scale": self.min_loss_scale,
            }
            raise_together(
                [
                    f"{key} must be at least 1 with a dynamic loss scale, found {value}"
                    for key, value in limits.items()
                    if value < 1
                ]
            )
        return self


class DeepSpeedBF16Config(Section):
    """Training in bf16; its range is that of fp32, so the loss is not scaled."""

    renamed_under: ClassVar[str | None] = "bf16"

    enabled: bool = key(False, "Whether to train in bf16, keeping fp32 master weights.")
    immediate_grad_update: bool = no_effect(False, "gradients are always summed as backward brings them")
    check_grad_overflow: bool = key(
        True, "Whether a step whose gradients hold inf or NaN is skipped (ZeRO stages 1 and 2)."
    )
    bf16_master_weights_and_grads: bool = key(
        False,
        "Whether master weights and gradients are kept in bf16 instead of fp32 (ZeRO stages 1-3; needs "
        "bf16_optimizer_states, or offload_optimizer, whose moments stay fp32).",
    )
    bf16_optimizer_states: bool = key(
        False, "Whether the optimizer's moments are kept in bf16 too; needs bf16_master_weights_and_grads."
    )

    @model_validator(mode="after")
    def _rules(self) -> DeepSpeedBF16Config:
        if self.bf16_optimizer_states and not self.bf16_master_weights_and_grads:
            raise ValueError(
                "bf16_optimizer_states is true but bf16_master_weights_and_grads is false; set both, or neither"
            )
        return self


class TorchAutocastConfig(Section):
    """torch.autocast around the forward pass."""

    enabled: bool = key(False, "Whether forward runs under torch.autocast; an autocast opened outside is replaced.")
    dtype: DtypeName | None = key(
        None, "Dtype that autocast computes in; null means the default that torch has for the device."
    )
    lower_precision_safe_modules: Names | None = key(
        None,
        "Fully qualified classes whose own parameters are communicated in that dtype; null means torch.nn Linear, "
        "Conv1d, Conv2d and Conv3d.",
    )


def _auto_or_list(value: Any) -> Any:
    if value == "auto" or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError(f'expected "auto" or a list of buffer name patterns, found {value!r}')


class DataTypesConfig(Section):
    """Dtypes by role, where they differ from the training dtype."""

    grad_accum_dtype: DtypeName | None = key(
        None, "Dtype in which gradients are accumulated; null means the model's dtype."
    )
    param_dtype: DtypeName | None = key(
        None, "Dtype that the parameters are expected to have; a check only, it never changes them."
    )
    buffer_dtype: DtypeName | None = key(
        None, "Dtype to which floating buffers are cast with fp16 or bf16 on; null leaves them alone."
    )
    keep_in_fp32_modules: Annotated[list[str] | Literal["auto"], BeforeValidator(_auto_or_list)] = key(
        "auto",
        "Buffers that stay in fp32, as name patterns where * matches anything; auto asks the model's modules, an "
        "empty list keeps none.",
    )
