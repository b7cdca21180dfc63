"""Apple GPUs: one device, no streams of its own, no distributed backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["MPS_Accelerator"]


class MPS_Accelerator(GenericAccelerator):
    """torch.mps; its allocator keeps no peaks, so they are those seen by the calls here."""

    name = "mps"
    backend = "gloo"  # process groups can be made; a collective on a tensor of the GPU cannot
    one_device = True
    has_streams = False

    def __init__(self) -> None:
        super().__init__()
        self._peaks = {"allocated": 0, "reserved": 0}

    @classmethod
    def why_unavailable(cls) -> str | None:
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without MPS"
        return None if torch.backends.mps.is_available() else "torch.mps needs macOS 12.3 and an Apple or AMD GPU"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = self._call("_get_default_mps_generator")
        return generator

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._seen("allocated", "current_allocated_memory")

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._seen("reserved", "driver_allocated_memory")

    def _seen(self, kind: str, function: str) -> int:
        now = int(self._call(function))
        self._peaks[kind] = max(self._peaks[kind], now)
        return now

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.memory_allocated()
        return self._peaks["allocated"]

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        self.memory_reserved()
        return self._peaks["reserved"]

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peaks = {"allocated": 0, "reserved": 0}

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return self._four_stats()

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._call("recommended_max_memory"))

    def available_memory(self, device_index: int | None = None) -> int:
        return max(0, self.total_memory() - self.memory_allocated())

    def is_bf16_supported(self) -> bool:
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def is_fp64_supported(self) -> bool:
        return False
