"""One parameter's folder of a universal checkpoint into its masters and optimizer states, whatever shards them."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.constants import CAT_DIM, PARAM
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.errors import CheckpointError, FeatureUnavailable
from deepspeed.zero.public.access import safe_set_full_fp32_param, safe_set_full_optimizer_state

__all__ = ["enable_universal_checkpoint", "load_hp_checkpoint_state"]


def enable_universal_checkpoint(param_list: Iterable[nn.Parameter]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state`."""
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]


def load_hp_checkpoint_state(
    self: nn.Parameter, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> Any:
    """Take over the files of `folder` (fp32.pt, exp_avg.pt, …); the step that is among them, or None.

    A tensor-parallel rank takes its part along the dim that the file names. All data-parallel ranks call this.
    """
    if ep_size > 1:
        raise FeatureUnavailable(f"{folder}: parameters of experts on {ep_size} ranks come with expert parallelism")
    files = {path.stem: path for path in sorted(Path(folder).glob("*.pt"))}
    if "fp32" not in files:
        raise CheckpointError(f"{folder} holds no fp32.pt; expected the folder of one parameter below zero/")
    step = None
    for key, path in files.items():
        state = safe_load(path)
        if key == "step":
            step = state
            continue
        value = state[PARAM] if isinstance(state, dict) else state
        if tp_world_size > 1:
            value = torch.chunk(value, tp_world_size, dim=state.get(CAT_DIM, 0))[tp_rank]
        if key == "fp32":
            safe_set_full_fp32_param(self, value)
        else:
            safe_set_full_optimizer_state(self, value, key)
    return step
