"""Questions to an mpu of any age: the tensor axis was called model or slice before, pipeline also pipe."""

from __future__ import annotations

from typing import Any

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]

_TENSOR = ("tensor_model", "slice", "model")
_PIPELINE = ("pipeline_model", "pipe")


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank's place among the ranks that share a layer; 0 without an mpu."""
    return int(_ask(mpu, _TENSOR, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """How many ranks share a layer; 1 without an mpu."""
    return int(_ask(mpu, _TENSOR, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """The ranks that share a layer; None without an mpu."""
    return _ask(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """How many stages there are; 1 if the mpu does not know them."""
    return int(_ask(mpu, _PIPELINE, "world_size", 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The ranks that hold one stage each; None if the mpu does not know them."""
    return _ask(mpu, _PIPELINE, "group", None)


def _ask(mpu: Any, spellings: tuple[str, ...], what: str, default: Any) -> Any:
    for spelling in spellings:
        method = getattr(mpu, f"get_{spelling}_parallel_{what}", None)
        if method is not None:
            return method()
    return default
