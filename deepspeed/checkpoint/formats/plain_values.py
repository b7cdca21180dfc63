"""Objects for a checkpoint as values that `torch.load(weights_only=True)` accepts without any allow-list."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

from deepspeed.errors import UsageError

__all__ = ["plain"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """A copy made of plain containers, numbers, strings and tensors; tensors that have their own memory are not copied.

    Subclasses of these become what they are at heart (a numpy number a number, an enum its value, a path a string).
    An object of any other class is refused, since reading it back would mean to run code out of the file.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        part = value.untyped_storage().nbytes() != value.nbytes  # torch.save would write all of it
        return value.detach().clone() if part else value.detach()
    if isinstance(value, Mapping):
        items = [(_key(key, where), plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if isinstance(value, Counter):
            return Counter(dict(items))
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return set(parts) if kind is frozenset else kind(parts)
    return _atom(value, where)


def _key(key: Any, where: str) -> Any:
    return plain(key, f"a key of {where}")


def _atom(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        return plain(value.value, where)
    if isinstance(value, PurePath):
        return str(value)
    heart: Any = next((kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), None)
    if heart is not None:
        return heart(value)
    if type(value).__module__ == "numpy":  # not imported: whoever has such a value has numpy
        return torch.from_numpy(value) if hasattr(value, "strides") and value.ndim else plain(value.item(), where)
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UsageError(
        f"{where} is a {kind_name}, which a checkpoint cannot hold: only numbers, strings, tensors and containers of "
        "them can be read back without running code from the file. Save its state instead, such as a dict of its "
        "attributes"
    )
