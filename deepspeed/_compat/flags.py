"""`HAS_TRITON`."""

from __future__ import annotations

from deepspeed.ops.capability import has_triton

__all__ = ["HAS_TRITON"]

HAS_TRITON: bool = has_triton.holds
