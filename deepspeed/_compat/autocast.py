"""The dtype that a parameter's gradient travels in under torch.autocast, as a mark on the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from deepspeed.precision.autocast import SAFE_MODULES

__all__ = [
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "get_all_comm_dtypes",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "sort_dtypes",
]

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def has_comm_dtype(param: nn.Parameter) -> bool:
    """True if the gradient travels in another dtype than the parameter's by the rules of torch_autocast."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype that the gradient travels in; the parameter's own without a mark."""
    dtype: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return dtype


def get_all_comm_dtypes(params: Iterable[nn.Parameter]) -> set[torch.dtype]:
    """The dtypes that gradients of these parameters travel in."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """In one order on every rank: by name."""
    return sorted(dtypes, key=str)


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The classes whose gradients travel in the lower precision unless the config names others."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in SAFE_MODULES]
