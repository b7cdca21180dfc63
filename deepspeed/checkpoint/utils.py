"""Helpers that clients import from here: file names, and copies of tensors that torch.save writes without ballast."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


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

    torch.save writes the whole storage of a view; a clone has none but its own.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        parts = [clone_tensors_for_torch_save(value, device) for value in item]
        return parts if isinstance(item, list) else tuple(parts)
    return item
