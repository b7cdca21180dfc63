"""Checkpoints: what a rank gives and wants as fragments, in DeepSpeed's files, universal ones or safetensors.

state and source are the two contracts; deepspeed, universal and native are formats of both; open finds the format.
The rest of the names are DeepSpeed's, for scripts that look into its checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import lazy

if TYPE_CHECKING:
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.megatron import DeepSpeedCheckpoint
    from deepspeed.checkpoint.open import open_checkpoint
    from deepspeed.checkpoint.reshape import ZeROCheckpoint, get_model_3d_descriptor, model_3d_desc
    from deepspeed.checkpoint.source import Source
    from deepspeed.checkpoint.state import Counters, GroupState, TrainingState
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.checkpoint.utils import (
        clone_tensors_for_torch_save,
        get_layer_ckpt_name_for_rank,
        get_model_ckpt_name_for_rank,
        get_zero_ckpt_name_for_rank,
    )

__all__ = [
    "UNIVERSAL_CHECKPOINT_INFO",
    "Counters",
    "DeepSpeedCheckpoint",
    "GroupState",
    "Source",
    "SubparamShape",
    "TrainingState",
    "ZeROCheckpoint",
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_3d_descriptor",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "model_3d_desc",
    "open_checkpoint",
]

_HOMES = {
    "constants": ("UNIVERSAL_CHECKPOINT_INFO",),
    "megatron": ("DeepSpeedCheckpoint",),
    "open": ("open_checkpoint",),
    "reshape": ("ZeROCheckpoint", "get_model_3d_descriptor", "model_3d_desc"),
    "source": ("Source",),
    "state": ("Counters", "GroupState", "TrainingState"),
    "universal_checkpoint": ("SubparamShape",),
    "utils": (
        "clone_tensors_for_torch_save",
        "get_layer_ckpt_name_for_rank",
        "get_model_ckpt_name_for_rank",
        "get_zero_ckpt_name_for_rank",
    ),
}

__getattr__ = lazy(
    __name__, {name: f"deepspeed.checkpoint.{home}:{name}" for home, names in _HOMES.items() for name in names}
)
