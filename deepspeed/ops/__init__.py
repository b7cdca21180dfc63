"""Kernels: `op(name)` is the best version of an operation that runs on this machine."""

from __future__ import annotations

from typing import Any

from deepspeed._package import submodule
from deepspeed.ops.registry import op

__all__ = ["__compatible_ops__", "__installed_ops__", "op"]

__compatible_ops__: dict[str, bool]
__installed_ops__: dict[str, bool]


def __getattr__(name: str) -> Any:
    if name not in ("__compatible_ops__", "__installed_ops__"):
        return submodule(__name__, name)
    from deepspeed.ops.op_builder import builders  # on first use: the answer asks compilers, drivers and devices

    answer = builders.compatible_ops() if name == "__compatible_ops__" else builders.installed_ops()
    globals()[name] = answer
    return answer
