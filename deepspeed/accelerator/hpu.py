"""Intel Gaudi."""

from __future__ import annotations

import os

import torch

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["HPU_Accelerator"]


class HPU_Accelerator(GenericAccelerator):
    """torch.hpu, which habana_frameworks adds; a process owns one device, and the runtime orders work by data."""

    name = "hpu"
    backend = "hccl"
    package = "habana_frameworks.torch.hpu"
    one_device = True
    graph_class = "HPUGraph"
    compile_backend = "hpu_backend"
    visible = ("HABANA_VISIBLE_MODULES",)

    def __init__(self) -> None:
        super().__init__()
        # Both must be off before the first device work; a value that the user gave stays.
        os.environ.setdefault("PT_HPU_LAZY_ACC_PAR_MODE", "0")
        os.environ.setdefault("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "0")

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return str(self._call("get_device_name")).upper() != "GAUDI"  # the first generation has none

    def is_fp64_supported(self) -> bool:
        return False

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = self._need("random").default_generators[device_index]
        return generator

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._call("mem_get_info")[1])
