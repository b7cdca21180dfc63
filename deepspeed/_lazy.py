"""Public names that are imported when first asked for, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy", "submodule"]


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
    except ImportError as error:  # [Note: removed names] in `_legacy`
        raise AttributeError(str(error)) from None
    if not found:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(path)
