"""The tensors inside what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, complex, type(None))
_OBJECTS = 4  # plain objects inside each other that are looked into; containers may nest as they like


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a structure of containers, dataclasses and plain objects; each object is looked into once."""
    if isinstance(value, Tensor):  # most outputs are just that
        yield value
        return
    seen: set[int] = set()
    pending = [(value, _OBJECTS)]
    while pending:
        item, left = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif not isinstance(item, _PLAIN) and id(item) not in seen:
            seen.add(id(item))
            pending += reversed([*_parts(item, left)])


def _parts(item: Any, left: int) -> Iterable[tuple[Any, int]]:
    if isinstance(item, Mapping):
        return [(part, left) for part in item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return [(part, left) for part in item]
    if isinstance(item, type) or callable(item) or not left:
        return ()
    if dataclasses.is_dataclass(item):
        return [(getattr(item, entry.name, None), left - 1) for entry in dataclasses.fields(item)]
    return [(part, left - 1) for part in vars(item).values()] if hasattr(item, "__dict__") else ()
