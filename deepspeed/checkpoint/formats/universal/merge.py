"""Slices of a parameter from model-parallel ranks as one tensor, by the rules that a model's file names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.universal.patterns import matches
from deepspeed.errors import CheckpointError

__all__ = ["merge_slices"]


def merge_slices(name: str, slices: Sequence[Tensor], rules: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The whole tensor and what a universal file says of it besides.

    `rules` is `universal_checkpoint_info`: lists of patterns of names by how their slices are put together.
    """

    def named(key: str) -> bool:
        return any(matches(pattern, name) for pattern in rules.get(key, ()))

    if named("tp_replicated_parameter_patterns") or named("pipeline_replicated_parameter_patterns"):
        if any(not torch.equal(part, slices[0]) for part in slices[1:]):
            raise CheckpointError(f"{name} should be the same on all {len(slices)} model-parallel ranks, but differs")
        return slices[0], {}
    if named("parameter_to_average_patterns"):
        return torch.stack(list(slices)).mean(0), {}
    if named("parameter_with_row_parallelism_patterns"):
        return torch.cat(list(slices), 1), {"cat_dim": 1}
    if named("parameter_with_2_sub_params_cat_dim_0"):
        halves = [part.chunk(2) for part in slices]
        whole = torch.cat([half[place] for place in (0, 1) for half in halves])
        return whole, {"cat_dim": 0, "param_n_sub_params": 2}
    for rule in rules.get("parameter_with_sub_params", ()):
        if any(matches(pattern, name) for pattern in rule["patterns"]):
            return _sub_parameters(slices, rule), {"cat_dim": rule["partition_dim"]}
    whole = torch.cat(list(slices)) if len(slices) > 1 else slices[0]
    extra: dict[str, Any] = {"cat_dim": 0}
    if named("vocabulary_parameter_patterns"):
        extra["vocab_tensor"] = True
        whole = whole[: rules.get("original_vocab_size", whole.shape[0])]
    return whole, extra


def _sub_parameters(slices: Sequence[Tensor], rule: Mapping[str, Any]) -> Tensor:
    """Parameters that are several in one: each is cut over the ranks by itself."""
    dim = rule["partition_dim"]
    sizes = rule["shape"][dim]
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    local = [size // len(slices) for size in sizes]
    cut = [part.split(local, dim) for part in slices]
    return torch.cat([torch.cat([parts[place] for parts in cut], dim) for place in range(len(sizes))], dim)
