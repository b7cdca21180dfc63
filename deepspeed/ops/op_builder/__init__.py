"""Builders of ops by their published names: `AsyncIOBuilder().load().aio_handle(...)`."""

from __future__ import annotations

from typing import Any

from deepspeed._package import submodule
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.builders import BUILDERS, builder_class

__all__ = ["OpBuilder", *BUILDERS]


def __getattr__(name: str) -> Any:
    return builder_class(name) if name in BUILDERS else submodule(__name__, name)
