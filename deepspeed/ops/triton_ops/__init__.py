"""Whether Triton is here, as scripts ask for it; its kernels are chosen by the registry."""

from __future__ import annotations

from deepspeed.ops.capability import has_triton

__all__ = ["is_triton_available"]


def is_triton_available() -> bool:
    """True if the package triton is installed; it is not imported for that."""
    return has_triton.holds
