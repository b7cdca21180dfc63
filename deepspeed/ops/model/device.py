"""What the Triton kernels of models take."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from deepspeed.ops.rehearsal import on_stage

__all__ = ["WIDEST", "takes", "takes_rows"]

WIDEST = 2**16
"""Elements of a row that a program can hold."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(x: Tensor) -> bool:
    """Whether the kernels run on such a tensor: on a GPU, or where Triton interprets them."""
    return x.dtype in _DTYPES and (x.is_cuda or on_stage(x.device) or os.environ.get("TRITON_INTERPRET") == "1")


def takes_rows(x: Tensor) -> bool:
    """As `takes`, for kernels that hold a whole row."""
    return takes(x) and 0 < x.shape[-1] <= WIDEST
