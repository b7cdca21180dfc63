"""Other accelerators than CUDA: Intel and Apple GPUs, Gaudi, Cambricon MLUs, Huawei Ascend NPUs, Tecorigin SDAA."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from deepspeed.accelerator.interface import DeepSpeedAccelerator

__all__ = [
    "HPU_Accelerator",
    "MLU_Accelerator",
    "MPS_Accelerator",
    "NPU_Accelerator",
    "SDAA_Accelerator",
    "XPU_Accelerator",
]


class XPU_Accelerator(DeepSpeedAccelerator):
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


class HPU_Accelerator(DeepSpeedAccelerator):
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


class MLU_Accelerator(DeepSpeedAccelerator):
    """torch.mlu, which the package torch_mlu adds."""

    name = "mlu"
    backend = "cncl"
    package = "torch_mlu"
    graph_class = "MLUGraph"
    exported = ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")
    visible = ("MLU_VISIBLE_DEVICES",)


class NPU_Accelerator(DeepSpeedAccelerator):
    """torch.npu, which the package torch_npu adds."""

    name = "npu"
    backend = "hccl"
    package = "torch_npu"
    graph_class = "NPUGraph"
    exported = ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    visible = ("ASCEND_RT_VISIBLE_DEVICES",)


class SDAA_Accelerator(DeepSpeedAccelerator):
    """torch.sdaa, which the package torch_sdaa adds."""

    name = "sdaa"
    backend = "tccl"
    package = "torch_sdaa"
    exported = ("TCCL", "LD_LIBRARY", "PATH")
    visible = ("SDAA_VISIBLE_DEVICES",)


class MPS_Accelerator(DeepSpeedAccelerator):
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
