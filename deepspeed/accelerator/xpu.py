"""Intel GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["XPU_Accelerator"]


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
