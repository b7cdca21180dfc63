"""Builders of ops by their published names: `AsyncIOBuilder().load().aio_handle(...)`."""

from __future__ import annotations

from typing import Any

from deepspeed._package import submodule
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.builders import INCLUDED, TO_COME, builder_class

__all__ = ["OpBuilder", *INCLUDED]


def __getattr__(name: str) -> Any:
    return builder_class(name) if name in INCLUDED or name in TO_COME else submodule(__name__, name)
