"""Tensors as memory: those inside containers, and how much they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for value in obj:
            yield from tensors_in(value)


def payload(obj: Any) -> int:
    """About how many bytes an object takes in a file: those of its tensors' memory, shared memory once."""
    if isinstance(obj, bytes):
        return len(obj)
    storages = (tensor.untyped_storage() for tensor in tensors_in(obj) if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
