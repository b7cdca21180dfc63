"""Functions read, and made again with something in them exchanged."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["copied", "exchanged", "tree_of"]


def tree_of(function: Any) -> ast.Module | None:
    """The code of a function; None where there is none to read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def copied(
    function: Any,
    names: Mapping[str, Any] | None = None,
    *,
    closure: tuple[types.CellType, ...] | None = None,
    code: types.CodeType | None = None,
) -> Any:
    """The same function, for which some `names` of its module mean something else."""
    made: Any = types.FunctionType(
        code or function.__code__,
        {**function.__globals__, **names} if names else function.__globals__,
        function.__name__,
        function.__defaults__,
        closure if closure is not None or code is not None else function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def exchanged(function: Any, old: Any, new: Any) -> Any:
    """A decorated function whose decorators call `new` instead of `old`; None where they do not show what they call."""
    if function is old:
        return new
    wrapped = getattr(function, "__wrapped__", None)
    inner = None if wrapped is None else exchanged(wrapped, old, new)
    cells: tuple[types.CellType, ...] = getattr(function, "__closure__", None) or ()
    if inner is None or not any(_holds(cell, wrapped) for cell in cells):
        return None
    made = copied(function, closure=tuple(types.CellType(inner) if _holds(cell, wrapped) else cell for cell in cells))
    made.__wrapped__ = inner
    return made


def _holds(cell: types.CellType, what: Any) -> bool:
    try:
        return cell.cell_contents is what
    except ValueError:  # nothing yet
        return False
