"""A number in memory that programs of a kernel raise to what they found."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["raise_to"]


@triton.jit
def raise_to(place_ptr, value):
    """Let the number be `value` at least. Most programs see that it is higher by now, and need not wait in line."""
    if value > tl.load(place_ptr, cache_modifier=".cg"):
        tl.atomic_max(place_ptr, value)
