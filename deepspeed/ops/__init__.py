"""Kernels: `op(name)` is the best version of an operation that runs on this machine."""

from __future__ import annotations

from typing import Any

from deepspeed._lazy import submodule
from deepspeed.ops.registry import op, operations

__all__ = ["__compatible_ops__", "op"]

__compatible_ops__: dict[str, bool]


def __getattr__(name: str) -> Any:
    if name != "__compatible_ops__":
        return submodule(__name__, name)
    # Looked up on first use: the answer asks compilers, drivers and devices.
    answer = {each.name: any(way.requires.holds for way in each.implementations) for each in operations().values()}
    globals()[name] = answer
    return answer
