"""Packages that a project imports and a test does not use: empty modules in their place."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where the project is not installed; `make projects` installs all of them."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed: run `make projects`"
    )


class _StandIn(ModuleType):
    """A module in which every public name is a class that takes any arguments and does nothing."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__, "__init__": lambda *_, **__: None})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        inside = any(name == package or name.startswith(f"{package}.") for package in self.packages)
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


@contextlib.contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Imports inside find these packages and modules empty; what they imported keeps what it got."""
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
