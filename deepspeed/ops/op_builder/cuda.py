"""The installed CUDA compiler: its version, whether it fits torch, and what to build for."""

from __future__ import annotations

import os
import re
import subprocess

import torch

from deepspeed.errors import DeepSpeedError
from deepspeed.ops.capability import nvcc, on_cuda
from deepspeed.ops.cuda_arch import CudaArch, parse_arch_list

__all__ = [
    "CUDAMismatchException",
    "MissingCUDAException",
    "assert_no_cuda_mismatch",
    "get_default_compute_capabilities",
    "installed_cuda_version",
    "target_archs",
]

# architecture → the first compiler that knows it, and the first that no longer does
_KNOWN: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "6.0": ((8, 0), (13, 0)),
    "6.1": ((8, 0), (13, 0)),
    "7.0": ((9, 0), (13, 0)),
    "7.5": ((10, 0), (99, 0)),
    "8.0": ((11, 0), (99, 0)),
    "8.6": ((11, 1), (99, 0)),
    "8.9": ((11, 8), (99, 0)),
    "9.0": ((11, 8), (99, 0)),
    "10.0": ((12, 8), (99, 0)),
    "12.0": ((12, 8), (99, 0)),
}
_OLDEST = (9, 0)


class MissingCUDAException(DeepSpeedError):
    """There is no CUDA compiler."""


class CUDAMismatchException(DeepSpeedError):
    """The CUDA compiler is not of torch's major version."""


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Major and minor version of the CUDA compiler; `name` is the op that asks, for the error."""
    compiler = nvcc()
    asks = f"op {name!r}: " if name else ""
    if compiler is None:
        raise MissingCUDAException(f"{asks}there is no CUDA compiler: nvcc is neither below CUDA_HOME nor on PATH")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    if found is None:
        raise MissingCUDAException(f"{asks}{compiler} --version names no release: {said.stdout or said.stderr!r}")
    return int(found[1]), int(found[2])


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """True if an extension of this compiler fits torch: the same major version, which alone has to agree."""
    installed = installed_cuda_version(name)
    asks = f"op {name!r}: " if name else ""
    if torch.version.cuda is None:
        raise CUDAMismatchException(f"{asks}torch {torch.__version__} was built without CUDA")
    if installed[0] != int(torch.version.cuda.split(".")[0]):
        raise CUDAMismatchException(
            f"{asks}the CUDA compiler is {installed[0]}.{installed[1]}, but torch was built with CUDA "
            f"{torch.version.cuda}; set CUDA_HOME to a toolkit of that major version"
        )
    return True


def get_default_compute_capabilities() -> str:
    """The architectures that the CUDA compiler can build for, as TORCH_CUDA_ARCH_LIST spells them.

    Without a compiler these are the ones that the oldest supported compiler knows.
    """
    try:
        version = installed_cuda_version()
    except MissingCUDAException:
        version = _OLDEST
    return ";".join(arch for arch, (first, gone) in _KNOWN.items() if first <= version < gone)


def target_archs() -> tuple[CudaArch, ...]:
    """What to build for: TORCH_CUDA_ARCH_LIST, else the GPUs of this machine, else everything the compiler knows."""
    wanted = parse_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if wanted:
        return wanted
    if on_cuda.holds:
        return tuple(sorted({CudaArch(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())}))
    return parse_arch_list(get_default_compute_capabilities())
