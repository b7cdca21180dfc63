"""Version facts under their published names; nothing is compiled into the package, so torch's are the running ones."""

from __future__ import annotations

import torch

from deepspeed._version import __git_branch__ as git_branch
from deepspeed._version import __git_hash__ as git_hash
from deepspeed._version import __version__ as version

__all__ = ["git_branch", "git_hash", "torch_info", "version"]


def _short(text: str | None) -> str:
    """ "2.13.0+cpu" → "2.13"; "0.0" stands for absent."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"


torch_info: dict[str, str] = {
    "version": _short(torch.__version__),
    "cuda_version": _short(torch.version.cuda),
    "hip_version": _short(torch.version.hip),
}
