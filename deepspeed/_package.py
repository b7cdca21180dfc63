"""The package itself: its version, the torch that it needs, public names that are imported on first use."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__version__ = "0.20.0"
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__: str | None = None
__git_branch__: str | None = None

_OLDEST_TORCH = (2, 9)  # as the distribution's requirements have it


@contextmanager
def without_collection() -> Iterator[None]:
    """While open no garbage is collected: importing torch makes many objects and no garbage."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def require_torch(version: str) -> None:
    """Raise an ImportError for a version of torch that is too old; one that cannot be read is let through."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise ImportError(
            f"deepspeed needs torch {oldest} or later and found {version}. Update it (pip install --upgrade "
            f'"torch>={oldest}"), or look for another installation of torch that Python finds first.'
        )


def lazy(module: str, table: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` for a table of name → `"package.module"` or `"package.module:attribute"`.

    Modules below the package are found without a row.
    """

    def resolve(name: str) -> Any:
        target = table.get(name)
        if target is None:
            return submodule(module, name)
        home, _, attribute = target.partition(":")
        value: Any = importlib.import_module(home)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[module], name, value)
        return value

    return resolve


def submodule(package: str, name: str) -> Any:
    """The module `package.name`, imported: scripts reach it as an attribute after a plain `import deepspeed`."""
    path = f"{package}.{name}"
    offered = "__path__" in vars(sys.modules[package]) and not name.startswith("_")
    try:
        found = offered and importlib.util.find_spec(path) is not None
    except ImportError as error:  # [Note: removed names] in `published/finder.py`
        raise AttributeError(str(error)) from None
    if not found:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(path)
