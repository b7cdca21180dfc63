"""The flag of multi-tensor operations: not 0 says that the update is to be left out."""

from __future__ import annotations

from torch import Tensor

__all__ = ["raised"]


def raised(noop_flag_buffer: Tensor | None) -> bool:
    """True if the flag is there and set; waits for its device."""
    return noop_flag_buffer is not None and bool(noop_flag_buffer.any())
