"""Op `pin_memory`."""

from __future__ import annotations

from deepspeed.ops.aio.handle import LockedTensors
from deepspeed.ops.aio.locked import unlock

__all__ = ["pin_handle"]


class pin_handle(LockedTensors):
    """Tensors in page-locked memory, without files."""

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As `free_cpu_locked_tensor`, by where the memory begins."""
        return unlock(address)
