"""Checkpoints: what a rank gives and wants as fragments, in DeepSpeed's files, universal ones or safetensors.

`formats`: what is in the files; `storage`: how they come to the disk and back. This folder: what people call.
The rest of the names are DeepSpeed's, for scripts that look into its checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._package import lazy

if TYPE_CHECKING:
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.formats.megatron import DeepSpeedCheckpoint
    from deepspeed.checkpoint.utils import (
        SubparamShape,
        clone_tensors_for_torch_save,
        get_layer_ckpt_name_for_rank,
        get_model_ckpt_name_for_rank,
        get_zero_ckpt_name_for_rank,
    )

__all__ = [
    "UNIVERSAL_CHECKPOINT_INFO",
    "DeepSpeedCheckpoint",
    "SubparamShape",
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]

_MODULES = {
    "constants": ("UNIVERSAL_CHECKPOINT_INFO",),
    "formats.megatron": ("DeepSpeedCheckpoint",),
    "utils": (
        "SubparamShape",
        "clone_tensors_for_torch_save",
        "get_layer_ckpt_name_for_rank",
        "get_model_ckpt_name_for_rank",
        "get_zero_ckpt_name_for_rank",
    ),
}

__getattr__ = lazy(
    __name__, {name: f"deepspeed.checkpoint.{module}:{name}" for module, names in _MODULES.items() for name in names}
)
