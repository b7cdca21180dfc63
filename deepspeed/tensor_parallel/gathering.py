"""Whole tensors of what ranks hold of them, and a whole state dict cut for this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deepspeed.fragments import Split
from deepspeed.parallel.cut import cut_of
from deepspeed.parallel.regions import Peers
from deepspeed.tensor_parallel.apply import splits_of
from deepspeed.tensor_parallel.regions import joined

__all__ = ["cut_state", "whole_of", "whole_parameters"]


def whole_of(part: Tensor, split: Split, axis: Peers) -> Tensor:
    """The whole tensor, on every rank; all of them call this."""
    sizes = [split.size(rank) for rank in range(axis.size)]
    side_by_side = joined(part.detach(), axis, sizes, split.dim)
    return split.join(side_by_side.split(sizes, split.dim))


def whole_parameters(module: nn.Module) -> dict[int, Tensor]:
    """The whole values of a layer's own split parameters, by id; all ranks call this, empty for any other layer."""
    share = cut_of(module)
    if share is None:
        return {}
    found = {}
    for name, split in share.splits.items():
        param = module._parameters[name]
        if param is not None:
            found[id(param)] = whole_of(param, split, share.axis)
    return found


def cut_state(model: nn.Module, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """A state dict of whole values as this rank holds them; values that have the size of a part already stay."""
    splits = splits_of(model)
    return {name: _cut(value, splits.get(name), rank) for name, value in state.items()}


def _cut(value: Any, split: Split | None, rank: int) -> Any:
    if (
        split is None
        or not isinstance(value, Tensor)
        or value.dim() <= split.dim
        or value.shape[split.dim] != split.total
    ):
        return value
    return split.cut(value, rank)
