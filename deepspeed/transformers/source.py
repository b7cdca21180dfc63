"""The source of functions: read, and made again with something in them exchanged.

[Note: constructions] Python has no event for the construction of an object, so the `__init__` of every class of modules
is wrapped while it is watched, also of classes that are defined meanwhile. A class calls the `__init__` of its base on
the same object: only the first counts.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any

from torch import nn


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


_MARK = "_construction_watchers"
_ABSENT = object()


class ParameterConstruction:
    """Enters `around(module)` before a module's outermost `__init__` begins, and leaves it at its end."""

    def __init__(
        self, around: Callable[[nn.Module], AbstractContextManager[None]], *, beside_others: bool = False
    ) -> None:
        self._around = around
        self._beside_others = beside_others
        self._under_way: list[nn.Module] = []
        self._watching = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch every module that is constructed meanwhile.

        Watchers may be nested: the innermost one is called, and all that are `beside_others`.
        """
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
            wrapped = self._wrapper(found)
            type.__setattr__(kind, "__init__", wrapped)
            undo.callback(_put_back, kind, "__init__", wrapped, before)

    def _wrapper(self, found: FunctionType) -> Callable[..., None]:
        original = _original(found)
        outer = (w for w in getattr(found, _MARK, ()) if w._beside_others or self._beside_others)
        watchers: tuple[ParameterConstruction, ...] = (self, *outer)

        @functools.wraps(original)
        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            with ExitStack() as stack:
                for each in watchers:
                    if each._watching and each._is_outermost(module):
                        stack.enter_context(each._tell(module))
                original(module, *args, **kwargs)

        setattr(__init__, _MARK, watchers)
        return __init__

    @contextmanager
    def _tell(self, module: nn.Module) -> Iterator[None]:
        self._under_way.append(module)
        try:
            with self._around(module):
                yield
        finally:
            self._under_way.pop()

    def _is_outermost(self, module: nn.Module) -> bool:
        if any(each is module for each in self._under_way):
            return False
        # An `__init__` that could not be wrapped, and has called this one, is not through yet.
        return self in getattr(type(module).__init__, _MARK, ())

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
    """The function below the wrappers of other watchers, which would be called too."""
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
