"""Precision: dtypes by role, the loss scale, casts, autocast, and the search for overflows."""

from __future__ import annotations

from deepspeed.precision.autocast import AutocastPolicy, forward_context
from deepspeed.precision.cast import BufferRule, CastReport, cast_inputs, cast_module
from deepspeed.precision.loss_scaler import has_overflow
from deepspeed.precision.policy import Precision, make_scale
from deepspeed.precision.scale import DynamicScale, LossScale, LossScaleError, NoScale, StaticScale

__all__ = [
    "AutocastPolicy",
    "BufferRule",
    "CastReport",
    "DynamicScale",
    "LossScale",
    "LossScaleError",
    "NoScale",
    "Precision",
    "StaticScale",
    "cast_inputs",
    "cast_module",
    "forward_context",
    "has_overflow",
    "make_scale",
]
