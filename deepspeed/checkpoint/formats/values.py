"""Objects for a checkpoint as values that `torch.load(weights_only=True)` accepts without an allow-list, and back.

[Note: tagged values] A value of `client_state` of another kind that is known here is written as `{MARK: [kind, ...]}`
with plain values, and `kind` is looked up in a table when it is read: the file chooses among these, and names neither a
class nor a function. An enum comes back as a member if it is one of the standard library, and as its value otherwise:
the class of a script may have moved or changed until then.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import http
import pathlib
import re
import signal
import socket
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from deepspeed.errors import CheckpointError, UsageError

ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_TEXTS = (
    pathlib.PurePath,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timezone,
)


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


MARK = "__deepspeed_value__"
"""The only key of a dict that stands for a value of another kind."""

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path)}
_NUMBERS = "biufc"
_BYTES = "SUMm"
_ENUMS: dict[str, type[enum.Enum]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for module in (http, signal, socket, uuid, re)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and len(kind)
}


def encode(value: Any, where: str) -> Any:
    """A copy that any safe loader accepts; `where` is told if a part of it is of a kind that is not known."""
    try:
        return _encode(value, where)
    except RecursionError as error:
        raise UsageError(f"{where} holds itself, or containers without end, which a checkpoint cannot hold") from error


def _encode(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in ATOMS and value != b"":  # empty bytes are pickled as a call that safe loaders refuse
        return value
    if isinstance(value, torch.Tensor):
        return own_memory(value, where)
    if isinstance(value, enum.Enum):
        name = f"{kind.__module__}.{kind.__qualname__}"
        known = _ENUMS.get(name) is kind and value.name in kind.__members__
        return _tag("enum", name, value.name) if known else _encode(value.value, where)
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, (list, tuple)):
        parts = _parts(value, where)
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, (set, frozenset, deque)):
        parts = _parts(value, where)
        if kind is set and all(type(part) in ATOMS for part in parts):
            return set(parts)
        if isinstance(value, deque):
            return _tag("deque", parts, value.maxlen)
        return _tag("set" if isinstance(value, set) else "frozenset", parts)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        name = "Namespace" if isinstance(value, argparse.Namespace) else "SimpleNamespace"
        return _tag(name, {str(key): _encode(item, f"{where}.{key}") for key, item in vars(value).items()})
    if isinstance(value, (np.generic, np.ndarray)):
        return _array(value, where)
    return _single(value, where)


def _tag(kind: str, *arguments: Any) -> dict[str, Any]:
    return {MARK: [kind, *arguments]}


def _parts(values: Any, where: str) -> list[Any]:
    return [_encode(item, f"{where}[{place}]") for place, item in enumerate(values)]


def _mapping(value: Mapping[Any, Any], where: str) -> Any:
    items = [(_encode(k, f"a key of {where}"), _encode(item, f"{where}[{k!r:.100}]")) for k, item in value.items()]
    if isinstance(value, defaultdict):
        factory = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), None)
        return _tag("defaultdict", factory, [list(item) for item in items])
    kind: Any = next((kind for kind in (Counter, OrderedDict) if isinstance(value, kind)), dict)
    if all(_is_key(key) for key, _ in items) and [key for key, _ in items] != [MARK]:
        return Counter(dict(items)) if kind is Counter else kind(items)
    return _tag(kind.__name__, [list(item) for item in items])


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in ATOMS


def _array(value: Any, where: str) -> Any:
    """numpy's numbers and arrays: those that torch knows as tensors, others as bytes."""
    if value.dtype.kind not in _NUMBERS + _BYTES:
        raise refused(value, where)
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS and value.dtype.itemsize <= 8:
        return _tag("number", value.dtype.str, value.item())
    whole = np.ascontiguousarray(value)
    kind = "scalar" if isinstance(value, np.generic) else "array"
    return _tag(
        kind, value.dtype.str, list(np.shape(value)), torch.from_numpy(np.frombuffer(whole.tobytes(), "u1").copy())
    )


def _single(value: Any, where: str) -> Any:
    if isinstance(value, datetime.datetime):
        return _tag("datetime", datetime.datetime.isoformat(value), value.fold)
    if isinstance(value, datetime.date):
        return _tag("date", datetime.date.isoformat(value))
    if isinstance(value, datetime.time):
        return _tag("time", datetime.time.isoformat(value), value.fold)
    if isinstance(value, datetime.timedelta):
        return _tag("timedelta", value.days, value.seconds, value.microseconds)
    if isinstance(value, datetime.timezone):
        offset = value.utcoffset(None)
        return _tag("timezone", offset.days, offset.seconds, offset.microseconds)
    if isinstance(value, pathlib.PurePath):
        name = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
        return _tag("path", name if name in _PATHS else "PurePosixPath", str(value))
    if isinstance(value, (decimal.Decimal, fractions.Fraction, uuid.UUID)):
        return _tag(next(k.__name__ for k in type(value).__mro__ if k.__name__ in _MAKERS), str(value))
    if isinstance(value, (range, slice)):
        return _tag(type(value).__name__, *(_encode(n, where) for n in (value.start, value.stop, value.step)))
    if value == b"":
        return _tag("bytes")
    heart: Any = next((kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), None)
    if heart is None:
        raise refused(value, where)
    return _encode(heart(value), where)


def decode(value: Any) -> Any:
    """What `encode` was given, of values out of a file: a CheckpointError for a kind that is not known."""
    if type(value) is dict and len(value) == 1 and MARK in value:
        return _decode(value[MARK])
    if isinstance(value, Counter):
        return Counter({key: decode(item) for key, item in value.items()})
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, decode(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(decode(item) for item in value)
    return value


def _decode(tagged: Any) -> Any:
    if not isinstance(tagged, list) or not tagged or not isinstance(tagged[0], str) or tagged[0] not in _MAKERS:
        raise CheckpointError(f"client_state holds {tagged!r:.200}, a value of a kind that is not known here")
    try:
        return _MAKERS[tagged[0]](*tagged[1:])
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"client_state holds {tagged!r:.200}, which is damaged: {error}") from error


def _items(items: Any) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(item)) for key, item in items]


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): decode(item) for key, item in values.items()}


def _from_bytes(dtype: str, shape: list[int], data: torch.Tensor) -> Any:
    kind = _dtype(dtype)
    if data.numel() != kind.itemsize * int(np.prod(shape, dtype=object)) or any(size < 0 for size in shape):
        raise ValueError(f"{data.numel()} bytes for {shape} of {dtype}")
    return np.frombuffer(data.numpy().tobytes(), kind).reshape(shape).copy()


def _dtype(text: str) -> np.dtype[Any]:
    kind = np.dtype(str(text))
    if kind.kind not in _NUMBERS + _BYTES or kind.itemsize == 0:
        raise ValueError(f"an array of {text!r:.50}")
    return kind


def _zone(*offset: int) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(*offset))


_MAKERS: dict[str, Callable[..., Any]] = {
    "dict": lambda items: dict(_items(items)),
    "OrderedDict": lambda items: OrderedDict(_items(items)),
    "Counter": lambda items: Counter(dict(_items(items))),
    "defaultdict": lambda factory, items: defaultdict(_FACTORIES[factory] if factory else None, _items(items)),
    "set": lambda parts: set(map(decode, parts)),
    "frozenset": lambda parts: frozenset(map(decode, parts)),
    "deque": lambda parts, most: deque(map(decode, parts), most),
    "Namespace": lambda values: argparse.Namespace(**_named(values)),
    "SimpleNamespace": lambda values: types.SimpleNamespace(**_named(values)),
    "enum": lambda kind, name: _ENUMS[kind].__members__[name],
    "number": lambda dtype, value: _dtype(dtype).type(value),
    "scalar": lambda dtype, shape, data: _from_bytes(dtype, shape, data)[()],
    "array": _from_bytes,
    "datetime": lambda text, fold: datetime.datetime.fromisoformat(text).replace(fold=fold),
    "date": lambda text: datetime.date.fromisoformat(text),
    "time": lambda text, fold: datetime.time.fromisoformat(text).replace(fold=fold),
    "timedelta": lambda days, seconds, micro: datetime.timedelta(days, seconds, micro),
    "timezone": _zone,
    "path": lambda kind, text: _PATHS[kind](text),
    "Decimal": lambda text: decimal.Decimal(str(text)),
    "Fraction": lambda text: fractions.Fraction(str(text)),
    "UUID": lambda text: uuid.UUID(str(text)),
    "range": range,
    "slice": lambda start, stop, step: slice(decode(start), decode(stop), decode(step)),
    "bytes": lambda: b"",
}
