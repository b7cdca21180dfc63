"""Objects for a checkpoint as values that `torch.load(weights_only=True)` accepts without any allow-list."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import types
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

from deepspeed.errors import UsageError

__all__ = ["ATOMS", "own_memory", "plain", "refused"]

ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_TEXTS = (PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, datetime.date, datetime.time, datetime.timezone)


def plain(value: Any, where: str) -> Any:
    """A copy made of plain containers, numbers, strings and tensors; tensors that have their own memory are not copied.

    What is something else becomes what it is at heart: a numpy number a number, an enum its value, a path, a date or a
    decimal its text, a namespace a dict, a duration its seconds. An object of a class that is not known is refused,
    since reading it back would mean to run code out of the file.
    """
    if type(value) in ATOMS:
        return bytearray() if value == b"" else value  # empty bytes are pickled as a call that safe loaders refuse
    if isinstance(value, torch.Tensor):
        return own_memory(value, where)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return plain(vars(value), where)
    if isinstance(value, Mapping):
        items = [(_key(key, where), plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if isinstance(value, Counter):
            return Counter(dict(items))
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = [plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, (set, frozenset)) and all(type(part) in ATOMS for part in parts):
            return set(parts)
        return tuple(parts) if isinstance(value, tuple) else parts
    return _atom(value, where)


def own_memory(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor without its history, and not as a part of a larger memory, of which torch.save would write all."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"{where} is a tensor of {tensor.layout}, which a checkpoint cannot hold; save it as dense")
    part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.detach().clone(memory_format=torch.contiguous_format) if part else tensor.detach()


def _key(key: Any, where: str) -> Any:
    found = plain(key, f"a key of {where}")
    try:
        hash(found)
    except TypeError:  # a frozen set has become a set
        return str(key)
    return found


def _atom(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        return plain(value.value, where)
    if isinstance(value, _TEXTS):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (range, slice)):
        return tuple(plain(number, where) for number in (value.start, value.stop, value.step))
    heart: Any = next((kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), None)
    if heart is not None:
        return plain(heart(value), where)
    if type(value).__module__ == "numpy":  # not imported: whoever has such a value has numpy
        if not value.ndim:
            number = value.item()  # of numbers that Python does not have, such as long doubles, numpy's own again
            return float(number) if type(number).__module__ == "numpy" else plain(number, where)
        known = value.dtype.kind in "biufc" and value.dtype.char not in "gG"  # torch has no long doubles
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="))) if known else plain(value.tolist(), where)
    raise refused(value, where)


def refused(value: Any, where: str) -> UsageError:
    """Why a value cannot be part of a checkpoint, and what to do."""
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    return UsageError(
        f"{where} is a {kind_name}, which a checkpoint cannot hold: only numbers, strings, tensors, dates, paths and "
        "the like and containers of them can be read back without running code from the file. Save its state instead, "
        "such as a dict of its attributes"
    )
