"""What goes wrong while a checkpoint's content is believed is told as what it is: a damaged or hostile checkpoint."""

from __future__ import annotations

import functools
import inspect
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from deepspeed.checkpoint.storage.durable import explain
from deepspeed.errors import CheckpointError, DeepSpeedError

__all__ = ["DAMAGE", "guarded", "reading"]

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
            place = getattr(self, "_directory", None) or getattr(self, "dir", type(self).__name__)
            raise _told(error, place) from error

    return call
