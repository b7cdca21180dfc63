"""`init_compression`: lets the layers that a config names be compressed; and students with fewer layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.basic_layer import CompressedLayer, compression_of
from deepspeed.compression.clean import redundancy_clean
from deepspeed.compression.helper import student_initialization
from deepspeed.compression.layer_state import WeightRounding
from deepspeed.compression.plan import (
    PATH,
    GroupPlan,
    check_deepspeed_config,
    compressed_layer,
    get_compress_methods,
    get_module_name,
    groups_of,
    plans_of,
    techniques_of,
    unwrapped,
)
from deepspeed.compression.snip import BlockRemoval
from deepspeed.config.compression import CompressionConfig, block_of
from deepspeed.errors import DeepSpeedConfigError, UsageError

__all__ = [
    "check_deepspeed_config",
    "get_compress_methods",
    "get_module_name",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
]


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Let the layers that `compression_training` names be compressed, in place; returns the model.

    They compute as before until the schedule of the engine, or a `compression_scheduler`, turns techniques on.
    """
    section = check_deepspeed_config(deepspeed_config)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise DeepSpeedConfigError(
                f"{PATH}.layer_reduction.enabled is true, and init_compression was called without teacher_model; pass "
                "the model that layers come from",
                path=f"{PATH}.layer_reduction.enabled",
            )
        student_initialization(model, teacher_model, section)
    compress(unwrapped(model), section, mpu)
    return model


def compress(model: nn.Module, section: CompressionConfig, mpu: Any = None, *, partly: bool = False) -> None:
    """The same without layers of a teacher; `partly` for a part of a model."""
    plans = list(plans_of(model, section, mpu, partly=partly))
    for plan in plans:
        for place, name in enumerate(plan.names):
            layer = compressed_layer(model, name, mpu)
            _enable(layer, plan, section)
            for other in plan.related[place] if plan.technique == "channel_pruning" and plan.related else ():
                _follow(model, other, layer)
    for name, module in model.named_modules():
        state = compression_of(module)
        if state is not None:
            state.name = name


def _enable(layer: Any, plan: GroupPlan, section: CompressionConfig) -> None:
    settings = techniques_of(section)[plan.technique]
    shared: Any = settings.shared_parameters
    params: Any = groups_of(settings)[plan.group].params
    match plan.technique:
        case "weight_quantization":
            mixed = shared.fp16_mixed_quantize
            layer.round_weight_by(
                WeightRounding(
                    params.start_bits,
                    params.target_bits,
                    params.quantization_period,
                    shared.quantize_groups,
                    asym=shared.quantization_type == "asymmetric",
                    stochastic=shared.rounding == "stochastic",
                    in_forward=shared.quantize_weight_in_forward,
                    change_ratio=mixed.quantize_change_ratio if mixed.enabled else None,
                    store_integers=shared.store_integers,
                    verbose=shared.quantize_verbose,
                )
            )
        case "activation_quantization":
            layer.enable_activation_quantization(params.bits, shared.quantization_type, shared.range_calibration)
        case "sparse_pruning" if shared.method == "snip_momentum":
            first, last = shared.schedule_offset, shared.schedule_offset_end
            block = block_of(shared.block_pattern)
            last = first if last is None else last
            layer.enable_block_pruning(
                BlockRemoval(params.dense_ratio, block, first, last, shared.schedule_offset_stride)
            )
        case "sparse_pruning":
            layer.enable_sparse_pruning(params.dense_ratio, shared.method)
        case "row_pruning":
            layer.enable_row_pruning(params.dense_ratio, shared.method)
        case "head_pruning":
            layer.enable_head_pruning(params.dense_ratio, shared.method, shared.num_heads)
        case _:
            layer.enable_channel_pruning(params.dense_ratio, shared.method)


def _follow(model: nn.Module, name: str, layer: CompressedLayer) -> None:
    """Let a batch norm behind a convolution give zero for its pruned channels."""
    if not isinstance(model.get_submodule(name), nn.BatchNorm2d):
        return
    norm = compressed_layer(model, name, None)
    if norm._parameters.get("weight") is None:
        raise UsageError(f"{PATH}.channel_pruning: {name} has no weight and bias; give it affine=True")
    norm.compressed.follows.append(layer)
