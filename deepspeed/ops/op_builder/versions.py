"""The versions of torch and of what it was built with, as `git_version_info.torch_info` names them."""

from __future__ import annotations

from typing import TypedDict

import torch

from deepspeed.accelerator import get_accelerator

__all__ = ["TorchInfo", "torch_versions"]


class TorchInfo(TypedDict):
    """Major and minor versions; "0.0" stands for absent."""

    version: str
    bf16_support: bool
    cuda_version: str
    nccl_version: str
    hip_version: str


def torch_versions() -> TorchInfo:
    """Those of the running torch and accelerator."""
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return {
        "version": _short(torch.__version__),
        "bf16_support": get_accelerator().is_bf16_supported(),
        "cuda_version": _short(torch.version.cuda),
        "nccl_version": _short(".".join(map(str, torch.cuda.nccl.version()))) if has_nccl else "0.0",
        "hip_version": _short(torch.version.hip),
    }


def _short(text: str | None) -> str:
    """ "2.13.0+cpu" → "2.13"."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"
