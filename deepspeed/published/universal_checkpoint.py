"""Parameters that read their own values from a universal checkpoint, for trainers with a loader of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.constants import CAT_DIM, PARAM
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.errors import CheckpointError
from deepspeed.zero.public.access import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)


def enable_universal_checkpoint(param_list: Iterable[nn.Parameter]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state(folder, tp_rank, tp_world_size)`."""
    for param in param_list:
        param.load_hp_checkpoint_state = MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]


def load_hp_checkpoint_state(
    self: nn.Parameter, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> int | None:
    """Take the values of the parameter's folder in a universal checkpoint; all data-parallel ranks call this.

    Returns the step of the optimizer, if it is there.
    """
    files = sorted(Path(folder).glob("*.pt"))
    if not any(file.stem == "fp32" for file in files):
        raise CheckpointError(f"{folder} has no fp32.pt: it is no parameter's folder of a universal checkpoint")
    current = safe_get_full_fp32_param(self)
    if current is None:
        raise CheckpointError(f"{folder}: no optimizer trains this parameter; pass it to deepspeed.initialize first")
    step = None
    for file in files:
        found = safe_load(str(file), mmap=False, map_location="cpu")
        value = found[PARAM] if isinstance(found, dict) else found
        if file.stem == "step":
            step = int(value)
            continue
        if ep_size > 1:
            value = value.chunk(ep_size, dim=0)[ep_rank]
        part = _slice(
            value, current.shape, found.get(CAT_DIM, 0) if isinstance(found, dict) else 0, tp_rank, tp_world_size
        )
        if file.stem == "fp32":
            safe_set_full_fp32_param(self, part)
        else:
            safe_set_full_optimizer_state(self, part, file.stem)
    return step


def _slice(value: Tensor, shape: torch.Size, dim: int, rank: int, ranks: int) -> Tensor:
    """The part of a tensor-parallel rank; the whole where ranks hold the same."""
    if value.shape == shape:
        return value
    part = value.narrow(dim, rank * shape[dim], shape[dim]) if value.shape[dim] == ranks * shape[dim] else value
    if part.shape != shape:
        raise CheckpointError(
            f"the checkpoint has {tuple(value.shape)}, of which rank {rank} of {ranks} has no part of {tuple(shape)} "
            f"along dim {dim}"
        )
    return part
