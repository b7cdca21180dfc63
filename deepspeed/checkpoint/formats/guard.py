"""What a checkpoint's content must be before it is used, and the errors of content that is not so."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from deepspeed.checkpoint.storage.durable import explain
from deepspeed.errors import CheckpointError, DeepSpeedError

C = TypeVar("C", bound=type)

DAMAGE: tuple[type[Exception], ...] = (
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    OSError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What content that is not as its format says makes readers stumble over."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Within it content is used as its format says it is; that it is not is a CheckpointError about `what`."""
    try:
        yield
    except DeepSpeedError:
        raise
    except DAMAGE as error:
        raise _told(error, what) from error


def _told(error: Exception, what: object) -> CheckpointError:
    if isinstance(error, OSError):
        return explain(error, str(error.filename or what))
    reason = str(error).strip().splitlines() or ["no reason given"]
    return CheckpointError(
        f"{what}: its content is not that of a checkpoint of this format ({type(error).__name__}: {reason[0]:.300}). "
        "It is damaged, or was not written by a program that is known here. Load another one."
    )


def guarded(kind: C) -> C:
    """Every public method and property of a source, and its construction, under `reading`."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        made: Any = None
        if inspect.isfunction(member):
            made = _under(member)
        elif isinstance(member, property) and member.fget is not None:
            made = property(_under(member.fget))
        elif isinstance(member, functools.cached_property):
            made = functools.cached_property(_under(member.func))
            made.__set_name__(kind, name)
        if made is not None:
            setattr(kind, name, made)
    return kind


def _under(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:  # not `with reading`: a load makes thousands of these calls
            return method(self, *arguments, **keywords)
        except DeepSpeedError:
            raise
        except DAMAGE as error:
            names = ("directory", "_directory", "dir")
            place = next((found for name in names if (found := getattr(self, name, None))), type(self).__name__)
            raise _told(error, place) from error

    return call


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
