"""Accelerators whose vendors extend torch: Intel GPUs and Gaudi, Cambricon MLUs, Huawei Ascend NPUs, Tecorigin SDAA."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["HPU_Accelerator", "MLU_Accelerator", "NPU_Accelerator", "SDAA_Accelerator", "XPU_Accelerator"]


class XPU_Accelerator(GenericAccelerator):
    """torch.xpu; collectives by torch's own XCCL where it was built in, else by the oneCCL bindings."""

    name = "xpu"
    backend = "ccl"
    graph_class = "XPUGraph"
    exported = ("CCL",)
    visible = ("ZE_AFFINITY_MASK",)

    def __init__(self) -> None:
        super().__init__()
        built_in = getattr(torch.distributed, "is_xccl_available", None)  # torch >= 2.7
        if built_in is not None and built_in():
            self._communication_backend_name = "xccl"

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.current_stream(device_index)  # no stream of an XPU waits for the others by itself

    def is_fp64_supported(self) -> bool:
        return bool(self._need("get_device_properties")(self.current_device()).has_fp64)

    def is_triton_supported(self) -> bool:
        return self.is_available() and find_spec("triton") is not None


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


class MLU_Accelerator(GenericAccelerator):
    """torch.mlu, which the package torch_mlu adds."""

    name = "mlu"
    backend = "cncl"
    package = "torch_mlu"
    graph_class = "MLUGraph"
    exported = ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")
    visible = ("MLU_VISIBLE_DEVICES",)


class NPU_Accelerator(GenericAccelerator):
    """torch.npu, which the package torch_npu adds."""

    name = "npu"
    backend = "hccl"
    package = "torch_npu"
    graph_class = "NPUGraph"
    exported = ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    visible = ("ASCEND_RT_VISIBLE_DEVICES",)


class SDAA_Accelerator(GenericAccelerator):
    """torch.sdaa, which the package torch_sdaa adds."""

    name = "sdaa"
    backend = "tccl"
    package = "torch_sdaa"
    exported = ("TCCL", "LD_LIBRARY", "PATH")
    visible = ("SDAA_VISIBLE_DEVICES",)
