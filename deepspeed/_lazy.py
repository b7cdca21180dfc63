"""Public names that are imported when first asked for, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy"]


def lazy(module: str, table: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for a table of name → `"package.module"` or `"package.module:attribute"`."""

    def resolve(name: str) -> Any:
        target = table.get(name)
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = target.partition(":")
        value: Any = importlib.import_module(home)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[module], name, value)
        return value

    return resolve
