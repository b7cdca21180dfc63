"""Builders of ops by their published names: `AsyncIOBuilder().load().aio_handle(...)`."""

from __future__ import annotations

from typing import Any

from deepspeed._lazy import submodule
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.builders import (
    TO_COME,
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    GDSBuilder,
    PinMemoryBuilder,
    TransformerBuilder,
    to_come,
)

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "TransformerBuilder",
]


def __getattr__(name: str) -> Any:
    if name not in TO_COME:
        return submodule(__name__, name)
    globals()[name] = made = to_come(name)
    return made
