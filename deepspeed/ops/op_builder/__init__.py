"""Builders of ops by their published names: `FusedAdamBuilder().load().multi_tensor_adam(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder, get_default_compute_capabilities
from deepspeed.ops.op_builder.builders import (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    DeepCompileBuilder,
    EvoformerAttnBuilder,
    FPQuantizerBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    GDSBuilder,
    InferenceBuilder,
    InferenceCoreBuilder,
    InferenceCutlassBuilder,
    NotImplementedBuilder,
    PinMemoryBuilder,
    QuantizerBuilder,
    RaggedOpsBuilder,
    RaggedUtilsBuilder,
    RandomLTDBuilder,
    SparseAttnBuilder,
    SpatialInferenceBuilder,
    StochasticTransformerBuilder,
    TransformerBuilder,
    UtilsBuilder,
)

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "CUDAOpBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "NotImplementedBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
    "builder_closure",
    "get_default_compute_capabilities",
]


def builder_closure(member_name: str) -> Callable[[], Any]:
    """A function that makes the builder of this name for the accelerator in use when it is called."""
    return lambda: get_accelerator().create_op_builder(member_name)
