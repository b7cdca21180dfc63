"""Functions read, and made again with something in them exchanged."""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["code_of", "copied", "exchanged", "is_read_from", "tree_of"]


def tree_of(function: Any) -> ast.Module | None:
    """The code of a function, whose first line is 1; None where there is none to read."""
    try:
        text = inspect.getsource(function)
        if not text[:1].isspace():
            return ast.parse(text)
        tree = ast.parse(f"if True:\n{text}")  # and not without its indentation, which strings have inside as well
    except (OSError, TypeError, SyntaxError):
        return None
    tree.body = tree.body[0].body  # type: ignore[attr-defined]
    return ast.increment_lineno(tree, -1)


def code_of(tree: ast.Module, function: types.FunctionType) -> types.CodeType | None:
    """What the function in a tree, which was read as this one's, is compiled to; None where there is none."""
    own = function.__code__
    flags = own.co_flags & __future__.annotations.compiler_flag
    outer = compile(tree, own.co_filename, "exec", flags=flags, dont_inherit=True)
    return next((each for each in outer.co_consts if _is_code(each) and each.co_name == own.co_name), None)


def is_read_from(function: types.FunctionType, tree: ast.Module | None) -> bool:
    """Whether a function runs what a tree says: files change, decorators hide what they call, classes change names."""
    return tree is not None and _equal(code_of(tree, function), function.__code__)


def _equal(one: Any, other: Any) -> bool:
    if not _is_code(one) or not _is_code(other):
        return type(one) is type(other) and bool(one == other)
    # not their bytes, which depend on what the rest of a file imports
    facts = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    return (
        all(getattr(one, fact) == getattr(other, fact) for fact in facts)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_equal, one.co_consts, other.co_consts))
    )


def _is_code(value: Any) -> bool:
    return isinstance(value, types.CodeType)


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
