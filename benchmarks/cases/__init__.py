"""The benchmark cases: every file of this folder that has a `CASE`."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.case import Case

__all__ = ["discover"]


def discover() -> dict[str, Case]:
    """Name → case, in the order of names."""
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)]
    found: list[Case] = [module.CASE for module in modules]
    return {case.name: case for case in sorted(found, key=lambda case: case.name)}
