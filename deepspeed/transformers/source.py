"""The source of functions: read, and made again with something in them exchanged."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import types
from collections.abc import Collection, Mapping
from typing import Any


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


def called_on_self(node: ast.AST) -> str | None:
    """The name of the module that `self.<name>(…)` calls; None for any other code."""
    function = node.func if isinstance(node, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) else None
    return function.attr if isinstance(owner, ast.Name) and owner.id == "self" else None  # type: ignore[union-attr]


def assigned(node: ast.AST) -> str | None:
    """The one name that a statement assigns."""
    simple = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return node.targets[0].id if simple else None  # type: ignore[attr-defined]


def changed_in_place(node: ast.AST) -> str | None:
    """What `x += y`, `x[0] = y` or `x.add_(y)` changes in place."""
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return ast.unparse(node.value)
    method = node.func if isinstance(node, ast.Call) else None
    in_place = isinstance(method, ast.Attribute) and method.attr.endswith("_") and not method.attr.endswith("__")
    return ast.unparse(method.value) if in_place else None  # type: ignore[union-attr]


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


def innermost(owner: type) -> Any:
    """The forward of a class without its decorators, which name what they wrap or hold a forward of the class."""
    return _inside(owner.forward, {f"{base.__qualname__}.forward" for base in owner.__mro__}, ())  # type: ignore[attr-defined]


def _inside(function: Any, names: Collection[str], above: tuple[Any, ...]) -> Any:
    told = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    held = map(_content, getattr(function, "__closure__", None) or ()) if told is None else [told]
    above = (*above, function)  # a decorator may hold itself, by which it knows whether it is the outermost
    for each in held:
        if isinstance(each, (types.FunctionType, functools.partial)) and not any(each is other for other in above):
            found = _inside(each, names, above)
            if told is not None or getattr(found, "__qualname__", None) in names:
                return found
    return function


def exchanged(function: Any, old: Any, new: Any, above: tuple[Any, ...] = ()) -> Any:
    """A decorated function whose decorators call `new` instead of `old`; None where they do not show what they call."""
    if function is old:
        return new
    if isinstance(function, functools.partial):
        inner = exchanged(function.func, old, new, above)
        return None if inner is None else functools.partial(inner, *function.args, **function.keywords)
    if not isinstance(function, types.FunctionType) or any(function is each for each in above):
        return None
    cells = function.__closure__ or ()
    inside = [exchanged(_content(cell), old, new, (*above, function)) for cell in cells]
    if all(each is None for each in inside):
        return None
    pairs = zip(cells, inside, strict=True)
    made = copied(function, closure=tuple(cell if each is None else types.CellType(each) for cell, each in pairs))
    if hasattr(function, "__wrapped__"):
        made.__wrapped__ = next(each for each in inside if each is not None)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
