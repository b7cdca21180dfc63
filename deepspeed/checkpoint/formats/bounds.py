"""Numbers out of files that become loops and memory: what they must be before they do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed.errors import CheckpointError

__all__ = ["dtype_called", "rank_count", "shape_of", "shapes_of"]

_MOST_RANKS = 2**16
_MOST_ELEMENTS = 2**60
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def rank_count(value: Any, where: object) -> int:
    """A number of ranks; a CheckpointError about `where` for anything that no job has."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.Tensor)) or not 0 < int(value) <= _MOST_RANKS:
        raise CheckpointError(f"{where} says it was written by {value!r:.50} ranks, expected 1 to {_MOST_RANKS}")
    return int(value)


def shape_of(value: Any, where: object) -> torch.Size:
    """The shape of a tensor; a CheckpointError about `where` for anything that no tensor has."""
    fine = isinstance(value, (list, tuple)) and all(type(size) is int and size >= 0 for size in value)
    if not fine or len(value) > 64 or math.prod(size for size in value if size) > _MOST_ELEMENTS:
        raise CheckpointError(f"{where}: {value!r:.100} is no shape of a tensor")
    return torch.Size(value)


def shapes_of(groups: Iterable[Mapping[str, Any]], where: object) -> list[dict[str, torch.Size]]:
    """Per group the shapes of its parameters by name."""
    found = [{name: shape_of(shape, f"{where}: {name}") for name, shape in group.items()} for group in groups]
    odd = next((name for group in found for name in group if not isinstance(name, str)), None)
    if odd is not None:
        raise CheckpointError(f"{where}: {odd!r:.100} is no name of a parameter")
    return found


def dtype_called(name: object) -> torch.dtype | None:
    """The dtype of a name such as "float32"; None for any other text."""
    return _DTYPES.get(name) if isinstance(name, str) else None
