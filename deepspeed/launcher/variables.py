"""The environment variables that matter to a training job, with everything secret masked."""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepspeed.errors import OpUnavailable
from deepspeed.launcher.masking import MASK, is_secret, scrub
from deepspeed.ops.cuda_arch import parse_arch_list
from deepspeed.ops.registry import operations

__all__ = ["relevant", "warnings"]

_PREFIXES = (
    *("DS_", "DEEPSPEED_", "NCCL_", "RCCL_", "GLOO_", "UCX_", "MV2_", "PDSH_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
    *("CUDA_", "HIP_", "ROCR_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("OMP_", "KMP_", "MKL_"),
)
_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "SDAA_VISIBLE_DEVICES"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST"),
    *("AZUREML_EXPERIMENT_ID", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("PYTHONPATH", "CONDA_PREFIX", "VIRTUAL_ENV"),
}
_OURS = {"PYTORCH_NVML_BASED_CUDA_CHECK"}  # set by importing this package


def _shown(name: str, value: str) -> str:
    """The value as one printable line, without anything that looks like a key, a token or a password."""
    if value and is_secret(name):
        return MASK
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in scrub(value))


def relevant(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name → value of the variables that are set and matter, sorted."""
    wanted = {name for name in environ if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: _shown(name, environ[name]) for name in sorted(wanted - _OURS)}


def warnings(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is set but cannot work, or does nothing."""
    found = []
    try:
        parse_arch_list(environ.get("TORCH_CUDA_ARCH_LIST", ""))
    except ValueError as error:
        found.append(str(error))
    ops = {each.variable: each for each in operations().values()}
    for name in sorted(environ):
        if name.startswith("DS_BUILD_") and environ[name] not in ("", "0"):
            found.append(f"{name} has no effect: nothing is compiled when the package is installed")
        elif name.startswith("DS_OP_") and name not in ops:
            found.append(f"{name} names no op; there are {', '.join(sorted(ops))}")
        elif name in ops and environ[name]:
            try:
                ops[name].demand(environ[name])
            except OpUnavailable as error:
                found.append(str(error))
    return found
