"""C++ that the library brings along, compiled on the machine where it is first used and kept."""

from __future__ import annotations

from deepspeed.ops.native.load import library

__all__ = ["library"]
