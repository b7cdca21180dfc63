"""Triton's compiler, loaded by threads before anybody needs it, once for the process.

Before it compiles anything it is imported, hashes itself (hundreds of megabytes) and has a C compiler build what talks
to the driver. The latter two leave Python's lock to others, and must have it back hundreds of times: while they do, a
thread that computes gives it up fifty times sooner than by default.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock

from deepspeed.ops.background import begun

__all__ = ["load_triton"]

_KEYS = ("triton.runtime.cache", "triton.compiler.compiler")
"""Where Triton's hash of itself is, by version."""
_LATE = (
    "triton.compiler.code_generator",
    "triton.backends.nvidia.compiler",
    "triton.language.extra.cuda.libdevice",
    "triton.experimental.gluon.language",
)
"""What Triton imports when it compiles its first kernel: too late for processes that are forked, see `forked.py`."""

_NAME = "deepspeed-load-triton"
_ONE_LOADS = Lock()


def load_triton() -> Future[None]:
    """Begin to load it, if nobody has; returns at once. What failed is told by the future."""
    with _ONE_LOADS:
        return _loading()


@cache
def _loading() -> Future[None]:
    return begun(_load, _NAME)


_TURN_S = 1e-4


@contextmanager
def _short_turns() -> Iterator[None]:
    """Who waits for Python's lock gets it soon, unless somebody has something else in mind."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before)


def _load() -> None:
    with _short_turns():
        _load_all()


def _load_all() -> None:
    importlib.import_module("triton.compiler")
    driver = begun(_open_driver, _NAME)
    hashed = begun(_hash, _NAME)
    for name in _LATE:
        with suppress(ImportError):  # another version's
            importlib.import_module(name)
    hashed.result()
    driver.result()


def _hash() -> None:
    for name in _KEYS:
        found = getattr(importlib.import_module(name), "triton_key", None)
        if found is not None:
            found()
            return


def _open_driver() -> None:
    """Make it; it asks for no device."""
    importlib.import_module("triton.runtime").driver.active  # noqa: B018
