"""What the Triton kernels of models take, and the shapes of what they compute row by row."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from deepspeed.ops.precompile import is_placeholder

WIDEST = 2**16
"""Elements of a row that a program can hold."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(x: Tensor) -> bool:
    """Whether the kernels run on such a tensor: on a GPU, or where Triton interprets them."""
    return x.dtype in _DTYPES and (x.is_cuda or is_placeholder(x.device) or os.environ.get("TRITON_INTERPRET") == "1")


def takes_rows(x: Tensor) -> bool:
    """As `takes`, for kernels that hold a whole row."""
    return takes(x) and 0 < x.shape[-1] <= WIDEST


def shaped(y: Tensor, shape: torch.Size) -> Tensor:
    """A new tensor in this shape, for an autograd function to return that keeps none of it.

    It is no view, which nobody outside of the function could change in place.
    """
    result: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return result


def rows_of(x: Tensor) -> Tensor:
    """A matrix of the rows of `x`, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()
