"""Tells when a module is constructed: before its outermost `__init__` begins, and when that is through.

Python has no event for that, so the `__init__` of every class of modules is wrapped while somebody watches, also of
classes that are defined meanwhile. A class calls the `__init__` of its base on the same object: only the first counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any

from torch import nn

_MARK = "_births"
_ABSENT = object()


class ParameterConstruction:
    """Enters `around(module)` before a module's outermost `__init__` begins, and leaves it at its end."""

    def __init__(self, around: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self._around = around
        self._under_way: list[nn.Module] = []
        self._watching = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch every module that is constructed meanwhile; watchers may be nested, the innermost one is told."""
        with ExitStack() as undo:
            for kind in _subclasses(nn.Module):
                self._wrap(kind, undo)
            self._wrap_later(undo)
            self._watching = True
            try:
                yield
            finally:
                self._watching = False

    def _wrap(self, kind: type[nn.Module], undo: ExitStack) -> None:
        before = found = kind.__dict__.get("__init__", _ABSENT)
        if found is _ABSENT:
            # A base that is no module may bring an `__init__` along, which is then the outermost one.
            home = next(base for base in kind.__mro__ if "__init__" in base.__dict__)
            found = None if issubclass(home, nn.Module) else vars(home)["__init__"]
        if isinstance(found, FunctionType):
            wrapped = self._wrapper(_original(found))
            type.__setattr__(kind, "__init__", wrapped)
            undo.callback(_put_back, kind, "__init__", wrapped, before)

    def _wrapper(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not self._watching or not self._is_outermost(module):
                original(module, *args, **kwargs)
                return
            self._under_way.append(module)
            try:
                with self._around(module):
                    original(module, *args, **kwargs)
            finally:
                self._under_way.pop()

        setattr(__init__, _MARK, self)
        return __init__

    def _is_outermost(self, module: nn.Module) -> bool:
        if any(each is module for each in self._under_way):
            return False
        # An `__init__` that could not be wrapped, and has called this one, is not through yet.
        return getattr(type(module).__init__, _MARK, None) is self

    def _wrap_later(self, undo: ExitStack) -> None:
        """Wrap classes that are defined while watching."""
        before = nn.Module.__dict__.get("__init_subclass__", _ABSENT)

        def __init_subclass__(kind: type[nn.Module], **options: Any) -> None:
            if before is _ABSENT:
                super(nn.Module, kind).__init_subclass__(**options)
            else:
                before.__get__(None, kind)(**options)
            self._wrap(kind, undo)

        wrapped = classmethod(__init_subclass__)  # type: ignore[arg-type]
        nn.Module.__init_subclass__ = wrapped  # type: ignore[assignment]
        undo.callback(_put_back, nn.Module, "__init_subclass__", wrapped, before)


def _original(function: Any) -> Callable[..., None]:
    """The function below the wrappers of other watchers, which would be told too."""
    while hasattr(function, _MARK):
        function = function.__wrapped__
    original: Callable[..., None] = function
    return original


def _put_back(kind: type, name: str, ours: Any, before: Any) -> None:
    """Undo one wrapping, unless somebody else has replaced it meanwhile."""
    if kind.__dict__.get(name) is not ours:
        return
    if before is _ABSENT:
        type.__delattr__(kind, name)
    else:
        type.__setattr__(kind, name, before)


def _subclasses(kind: type[nn.Module]) -> list[type[nn.Module]]:
    """Every class below, each once."""
    found: dict[type[nn.Module], None] = {}
    waiting = list(kind.__subclasses__())
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting.extend(each.__subclasses__())
    return list(found)
