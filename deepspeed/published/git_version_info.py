"""Version facts under their published names; nothing is compiled into the package, so torch's are the running ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed._package import __git_branch__ as git_branch
from deepspeed._package import __git_hash__ as git_hash
from deepspeed._package import __version__ as version

if TYPE_CHECKING:
    accelerator_name: str
    compatible_ops: dict[str, bool]
    installed_ops: dict[str, bool]
    torch_info: dict[str, str | bool]

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]


def __getattr__(name: str) -> Any:
    # Asked at every look: another accelerator may be set, and the answers ask drivers and devices.
    if name == "accelerator_name":
        from deepspeed.accelerator import get_accelerator

        return get_accelerator()._name
    if name == "torch_info":
        return _torch_versions()
    if name in ("compatible_ops", "installed_ops"):
        from deepspeed.ops.op_builder import builders

        return getattr(builders, name)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _torch_versions() -> dict[str, str | bool]:
    """Major and minor versions of the running torch and of what it was built with; "0.0" stands for absent."""
    import torch

    from deepspeed.accelerator import get_accelerator

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
