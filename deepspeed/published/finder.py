"""Old import paths, served from the table in `published/old_paths.py`; only `deepspeed/__init__.py` imports this.

[Note: old paths] A path that moved is the *same* module object under a second name, so `mock.patch`, `pickle` and
`isinstance` agree about it. A path whose names now live apart is a module without names of its own: reading,
setting and deleting one of them happens at its home. Packages that only lead to old paths are made up where no
real one exists. The finder stands before the file finder, because that one would load the files of a moved
package a second time under the old name.

[Note: removed names] Importing a module or name that was removed, or is still to come, is an ImportError that says what
to use; reading it is an AttributeError, so that `hasattr` is False. `from module import name` asks the finder for
`module.name` only where the module has a `__path__`, so modules of which names were removed get an empty one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from deepspeed._package import submodule
from deepspeed.published.old_paths import COMING, MOVED, REEXPORTED, REMOVED, SPLIT

_LEADING = {
    ".".join(parts[:count])
    for parts in (path.split(".") for path in (*MOVED, *SPLIT))
    for count in range(2, len(parts))
}

_LOST_NAMES = {key.rpartition(".")[0] for key in (*REMOVED, *COMING)}  # modules that stay


def _gone(name: str) -> str | None:
    """Why there is no such module or name: it was removed, or is still to come; None if it was never here."""
    module, _, last = name.rpartition(".")
    found = REMOVED.get(name) or (None if last.startswith("_") else REMOVED.get(f"{module}.*"))
    if found is not None:
        return f"{name} is not part of this library: {found}"
    coming = next((COMING[head] for head in _heads(name) if head in COMING), None)
    return None if coming is None else f"{name} is not part of this version yet; until then: {coming}"


def _heads(name: str) -> list[str]:
    """The name itself and the packages that it lies in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 1, -1)]


class _Pointer(ModuleType):
    """An old path without names of its own: they are at their homes, or are old paths below it."""

    def _home(self, name: str) -> tuple[ModuleType, str] | None:
        row = SPLIT.get(self.__name__, {}).get(name)
        if row is None:
            return None
        home, _, new = row.partition(":")
        return importlib.import_module(home), new or name

    def __getattr__(self, name: str) -> Any:
        if (found := self._home(name)) is not None:
            return getattr(*found)
        if name == "__all__":
            return sorted(SPLIT.get(self.__name__, {}))
        below = f"{self.__name__}.{name}"
        if below in MOVED or below in SPLIT or below in _LEADING:
            return importlib.import_module(below)
        raise AttributeError(_gone(below) or f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if (found := self._home(name)) is not None:
            if hasattr(*found):
                self.__dict__.setdefault("_replaced", {}).setdefault(name, getattr(*found))
            setattr(*found, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Undo a replacement, as tools that patch do where a module has no such name of its own; else delete."""
        if (found := self._home(name)) is None:
            super().__delattr__(name)
        elif name in (replaced := self.__dict__.get("_replaced", {})):
            setattr(*found, replaced.pop(name))
        else:
            delattr(*found)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SPLIT.get(self.__name__, {})})


def _moved(name: str) -> str | None:
    """The home of a path that moved itself, or that lies below a package that moved."""
    head, below = name, ""
    while "." in head:
        if head in MOVED:
            return MOVED[head] + below
        if below == "" and (head in SPLIT or head in _LEADING):
            return None
        head, _, last = head.rpartition(".")
        below = f".{last}{below}"
    return None


class _Reexporting(Loader):
    """Loads a module that offers names of other modules, too, on first use, or a package that offers its modules."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what shows sources and files

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        own, rows = vars(module).get("__getattr__"), REEXPORTED.get(module.__name__, {})

        def find(name: str) -> Any:
            if name not in rows:
                return submodule(module.__name__, name) if own is None else own(name)
            home, _, new = rows[name].partition(":")
            value = getattr(importlib.import_module(home), new or name)
            setattr(module, name, value)
            return value

        vars(module)["__getattr__"] = find


class _Finder(MetaPathFinder, Loader):
    """Finds and loads the paths of the table."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("deepspeed."):
            return None
        if (home := _moved(name)) is not None:
            if name not in MOVED and importlib.util.find_spec(home) is None:
                return None
            return ModuleSpec(name, self, origin=home)
        if name in SPLIT:
            return ModuleSpec(name, self, is_package=name in _LEADING or name in _LOST_NAMES)
        spec = PathFinder.find_spec(name, path)
        if spec is None and name in _LEADING:
            return ModuleSpec(name, self, is_package=True)
        if spec is None and (reason := _gone(name)) is not None:
            raise ImportError(reason, name=name)
        module, _, last = name.rpartition(".")
        if spec is None and last == "__main__" and module in _LOST_NAMES:  # `python -m` takes it for a package
            return importlib.util.spec_from_file_location(name, sys.modules[module].__file__)
        if spec is not None and name in _LOST_NAMES and spec.submodule_search_locations is None:
            spec.submodule_search_locations = []
        if spec is not None and spec.loader is not None and (name in REEXPORTED or spec.submodule_search_locations):
            spec.loader = _Reexporting(spec.loader)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.origin is None:
            return _Pointer(spec.name)
        home = importlib.import_module(spec.origin)
        spec.loader_state = home.__spec__
        return home

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state  # importlib has put the old path's spec on the home


def install() -> None:
    """Serve the old paths from now on; once is enough, twice is harmless."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]
    sys.meta_path.insert(0, _Finder())
