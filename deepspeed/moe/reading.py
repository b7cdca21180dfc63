"""When a block of experts calls its other modules, read from its source: behind its experts, or before them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["called_after", "called_before"]

_PURE = frozenset(["torch", "F", "functional"])
"""What functions are taken from that know promises."""

Place = tuple[int, int]


@dataclass(frozen=True)
class _Call:
    """A call `self.<name>(…)`."""

    name: str
    begin: Place
    end: Place
    node: ast.Call

    @property
    def simple(self) -> bool:
        """With one argument."""
        return len(self.node.args) == 1 and not self.node.keywords


def called_after(block: type[nn.Module], experts: str) -> tuple[str, ...]:
    """What of its own a block's code calls once, with one argument, behind its only call of `self.<experts>`."""
    tree = _tree(block)
    calls = [] if tree is None else list(_calls(tree))
    known = _once(calls, experts)
    if known is None:
        return ()
    found = (call for call in calls if call.simple and call.begin > known.begin)
    return tuple(call.name for call in found if _once(calls, call.name) is call)


def called_before(block: type[nn.Module], experts: str) -> tuple[str, ...]:
    """What of its own a block's code calls once before its only call of `self.<experts>`, for use behind it.

    The result is a variable that is read there only, by operators and functions of torch; nothing is changed in place.
    """
    tree = _tree(block)
    calls = [] if tree is None else list(_calls(tree))
    known = _once(calls, experts)
    if tree is None or known is None or any(map(_changes, ast.walk(tree))):
        return ()
    return tuple(
        call.name
        for call in calls
        if call.simple and call.end < known.begin and _once(calls, call.name) is call and _waits(tree, call, known.end)
    )


def _tree(block: type[nn.Module]) -> ast.AST | None:
    """The source of a block's forward; None if it is not known, or does something again and again."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(block.forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    return None if any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(tree)) else tree


def _calls(tree: ast.AST) -> Iterator[_Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                yield _Call(node.func.attr, _begin(node), _end(node), node)


def _once(calls: list[_Call], name: str) -> _Call | None:
    found = [call for call in calls if call.name == name]
    return found[0] if len(found) == 1 else None


def _changes(node: ast.AST) -> bool:
    """True for what changes values in place."""
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
        return True
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name.endswith("_") and not name.endswith("__")


def _waits(tree: ast.AST, call: _Call, end: Place) -> bool:
    """True if the result of a call is needed behind a place only, and there by what knows promises."""
    variable = next(
        (
            node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and node.value is call.node
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ),
        None,
    )
    known = {id(each) for node in ast.walk(tree) for each in _operands(node)}
    reads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Load)
    ]
    return bool(reads) and all(id(node) in known and _begin(node) > end for node in reads)


def _operands(node: ast.AST) -> list[ast.expr]:
    """What operators and functions of torch are given."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        return list(node.args) if isinstance(owner, ast.Name) and owner.id in _PURE else []
    return []


def _begin(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> Place:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
