"""Version facts under their published names; nothing is compiled into the package, so torch's are the running ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed._version import __git_branch__ as git_branch
from deepspeed._version import __git_hash__ as git_hash
from deepspeed._version import __version__ as version

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.versions import TorchInfo

    accelerator_name: str
    compatible_ops: dict[str, bool]
    installed_ops: dict[str, bool]
    torch_info: TorchInfo

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]


def __getattr__(name: str) -> Any:
    # Asked at every look: another accelerator may be set, and the answers ask drivers and devices.
    if name == "accelerator_name":
        from deepspeed.accelerator import get_accelerator

        return get_accelerator()._name
    if name == "torch_info":
        from deepspeed.ops.op_builder.versions import torch_versions

        return torch_versions()
    if name in ("compatible_ops", "installed_ops"):
        from deepspeed.ops.op_builder import all_ops

        return getattr(all_ops, name)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
