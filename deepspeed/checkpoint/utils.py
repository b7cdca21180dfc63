"""What clients import from here: file names, copies of tensors that torch.save writes without ballast, and a rule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "WHOLE",
    "SubparamShape",
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]

WHOLE = "whole"
"""The entry of a state dict's metadata with what makes it whole, if this rank has a part of the model alone."""


@dataclass
class SubparamShape:
    """A parameter that is several: `shape` has a tuple of their sizes in place of `partition_dim`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The model's file; `mp_rank_str` has two digits."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """A rank's optimizer file."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """A pipeline layer's file."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = torch.device("cpu")) -> Any:
    """A copy with every tensor, also in nested lists, tuples and dicts, cloned on `device`.

    torch.save writes the whole storage of a view; a clone has none but its own. The state dict of a model whose experts
    are spread over ranks becomes that of the whole model, for which all ranks call this.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        for prefix, told in getattr(item, "_metadata", {}).items():
            if isinstance(told, dict) and WHOLE in told:
                item = told[WHOLE].whole(item, f"{prefix}." if prefix else "")
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        parts = [clone_tensors_for_torch_save(value, device) for value in item]
        return parts if isinstance(item, list) else tuple(parts)
    return item
