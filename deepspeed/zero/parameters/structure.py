"""The tensors inside what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]

_DEPTH = 4
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in a nested structure of containers, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN) or not depth:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None), depth - 1)
    elif not isinstance(value, type) and not callable(value) and hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth - 1)
