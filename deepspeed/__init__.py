"""Train and serve models larger than your GPUs: one JSON file, no change to the model.

This file is the API: what `__all__` names is public, everything else may move. Names are resolved on first use, so
that `import deepspeed` costs little more than `import torch`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# The check for CUDA must not create a context: a fork later in the program would then fail.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch  # noqa: E402, F401 - the environment variable comes first

from deepspeed import _legacy  # noqa: E402
from deepspeed._lazy import lazy  # noqa: E402
from deepspeed._version import (  # noqa: E402
    __git_branch__,
    __git_hash__,
    __version__,
    __version_major__,
    __version_minor__,
    __version_patch__,
)
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError  # noqa: E402
from deepspeed.utils.logging import log_dist, logger  # noqa: E402

if TYPE_CHECKING:
    from deepspeed import accelerator, comm, ops, parallel, utils
    from deepspeed._api import add_config_arguments
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import init_distributed
    from deepspeed.config import DeepSpeedConfig

# name → module, or module:attribute; imported when first asked for
_LAZY = {
    "DeepSpeedConfig": "deepspeed.config:DeepSpeedConfig",
    "accelerator": "deepspeed.accelerator",
    "add_config_arguments": "deepspeed._api:add_config_arguments",
    "comm": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator:get_accelerator",
    "init_distributed": "deepspeed.comm:init_distributed",
    "ops": "deepspeed.ops",
    "parallel": "deepspeed.parallel",
    "utils": "deepspeed.utils",
}

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

__all__ = [
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedError",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "log_dist",
    "logger",
    "ops",
    "parallel",
    "utils",
]

__getattr__ = lazy(__name__, _LAZY)

_legacy.install()


def __dir__() -> list[str]:
    return sorted(__all__)
