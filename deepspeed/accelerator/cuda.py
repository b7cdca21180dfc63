"""NVIDIA GPUs, and AMD GPUs, which torch also calls "cuda"."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.errors import AcceleratorError

__all__ = ["CUDA_Accelerator"]

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context, not only the current one


class CUDA_Accelerator(DeepSpeedAccelerator):
    """CUDA, or ROCm where torch was built for it."""

    name = "cuda"
    backend = "nccl"
    graph_class = "CUDAGraph"

    def __init__(self) -> None:
        super().__init__()
        self._registered: dict[int, int] = {}  # address -> bytes
        if os.name == "nt":
            self._communication_backend_name = "gloo"  # there is no NCCL for Windows

    @classmethod
    def why_unavailable(cls) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} was built without CUDA and ROCm"
        if torch.cuda.is_available():
            return None
        limit = next((f"{v}={os.environ[v]!r}, " for v in _visible() if v in os.environ), "")
        return f"torch.cuda finds no usable device ({limit}or the driver is missing or too old)"

    def _capability(self) -> tuple[int, int]:
        """Compute capability of the current device; (0, 0) where there is none."""
        return torch.cuda.get_device_capability() if self.is_available() else (0, 0)

    # ---- dtypes, misc

    def is_fp16_supported(self) -> bool:
        major, _ = self._capability()
        return major >= 7 or (major == 6 and os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1")

    def is_triton_supported(self) -> bool:
        return self._capability() >= (7, 0) and find_spec("triton") is not None

    def prefer_triton_grouped_mm(self) -> bool:
        # torch's own grouped product is a fast kernel from Hopper on; elsewhere it is a loop of products.
        own_is_fast = torch.version.hip is None and self._capability() >= (9, 0)
        return self.is_triton_supported() and not own_is_fast

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        # torch's binding knows one domain and no categories: they become part of the text.
        prefix = "/".join(part for part in (domain, category) if part)
        self._module.nvtx.range_push(f"{prefix}: {msg}" if prefix else msg)

    def range_pop(self, domain: str | None = None) -> None:
        self._module.nvtx.range_pop()

    # ---- page-locked host memory

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        if num_bytes <= 0:
            raise AcceleratorError(f"cannot page-lock {num_bytes} bytes at {address:#x}; the size must be positive")
        if address in self._registered:
            raise AcceleratorError(
                f"host memory at {address:#x} is already registered with {self._registered[address]} bytes; "
                "call unregister_host_memory first"
            )
        runtime = self._module.cudart()
        _check(runtime, "cudaHostRegister", runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
        self._registered[address] = num_bytes
        return True

    def unregister_host_memory(self, address: int) -> bool:
        if address not in self._registered:
            raise AcceleratorError(
                f"host memory at {address:#x} was not registered; {len(self._registered)} other addresses are. "
                "Pass the address that was given to register_host_memory"
            )
        runtime = self._module.cudart()
        _check(runtime, "cudaHostUnregister", runtime.cudaHostUnregister(address))
        del self._registered[address]
        return True

    # ---- environment

    def export_envs(self) -> list[str]:
        return ["NCCL"] if torch.version.hip is None else ["NCCL", "RCCL"]

    def visible_devices_envs(self) -> list[str]:
        return list(_visible())


def _visible() -> tuple[str, ...]:
    # On ROCm the HIP variable wins where both are set, so both have to be written.
    if torch.version.hip is None:
        return ("CUDA_VISIBLE_DEVICES",)
    return ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _check(runtime: Any, function: str, status: Any) -> None:
    if int(status) == 0:
        return
    # The failure stays in CUDA's error slot, where the next kernel launch would take it for its own; let one here.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    raise AcceleratorError(
        f"{function} failed with error {int(status)} ({runtime.cudaGetErrorString(status)}); "
        "check that the address is valid host memory and that the limit of locked memory (ulimit -l) allows it"
    )
