"""Sums around a normalisation, computed by its kernel: of what it normalises, and of the gradients of that.

They are between modules, in the layer's own forward, where no module could be replaced. So the forward is written
again, for layers in whose code these lines follow each other, whatever their names are:

    hidden = residual + hidden               hidden, residual = self.norm(hidden, residual=residual)
    residual = hidden                   →
    hidden = self.norm(hidden)

    residual = hidden                        hidden, residual = self.norm(hidden, keeps=True)
    hidden = self.norm(hidden)          →

Everything else of it stays, and so does the module of the norm, which is called as ever, for sharded weights. A
compiler sees the class's own forward, and so does whoever has put a hook on the norm.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from deepspeed.fusion.functions import code_of, copied, exchanged, innermost, is_read_from, tree_of
from deepspeed.fusion.layers import only_ours, watched_everywhere
from deepspeed.fusion.likeness import overridden
from deepspeed.fusion.swap import Refused, Swap, put_forward, replacement

__all__ = ["find_residual"]


def find_residual(module: nn.Module, norms: Mapping[nn.Module, Swap]) -> Swap | Refused | None:
    """How the sum before one of these norms, which run on kernels, is computed; None for modules without one."""
    names = {name for name, child in module.named_children() if child in norms}
    forward = innermost(type(module)) if names else None
    if not isinstance(forward, types.FunctionType):
        return None
    tree = tree_of(forward)
    found = {} if tree is None else _rewritten(tree, names)
    if tree is None or not found:
        return None
    if reason := overridden(module):
        return Refused(reason)
    if forward.__closure__ or not is_read_from(forward, tree_of(forward)):
        return Refused(f"the forward of {type(module).__name__} uses names of its class or around it")
    again = exchanged(type(module).forward, forward, _function(tree, forward))
    if again is None:
        return Refused(f"decorators of {type(module).__name__}.forward hide what they call")
    put = partial(put_forward, module, _Layer(again, tuple(found)).run)
    name, adds = max(found.items(), key=lambda each: each[1])
    norm = norms[module.get_submodule(name)]
    scene = None if norm.scene is None else partial(norm.scene, summed=True)
    return Swap(f"{'sum' if adds else 'sum of gradients'} in {norm.kernel}", put, scene)


class _Layer:
    """A layer whose forward was written again."""

    def __init__(self, forward: Callable[..., Any], norms: tuple[str, ...]) -> None:
        self.forward, self.norms = forward, norms

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Hooks of others on a norm would see a norm that also adds; for them it stays what it was.

        So it does where a norm was exchanged or wrapped meanwhile, by one that only normalises.
        """
        ours = not watched_everywhere() and all(_adds(module._modules.get(norm)) for norm in self.norms)
        return (self.forward if ours else type(module).forward)(module, *args, **kwargs)


def _adds(norm: nn.Module | None) -> bool:
    return norm is not None and replacement(norm) is not None and only_ours(norm)


def _rewritten(tree: ast.Module, names: Collection[str]) -> dict[str, bool]:
    """Write sums around these norms again, in place; by the name of the norm, whether it adds before it normalises."""
    found: dict[str, bool] = {}
    changed = {name for node in ast.walk(tree) if (name := _changed(node)) is not None}
    for node in ast.walk(tree):
        inside = getattr(node, "body", None)
        body: list[ast.stmt] = inside if isinstance(inside, list) else []
        for at in range(len(body) - 1):
            for length, fits, call in ((3, _is_sum, _sum), (2, _is_kept, _keep)):
                lines = body[at : at + length]
                norm = _norm(lines[-1]) if len(lines) == length else None
                if norm is not None and norm[0] in names and fits(*lines) and _assigned(lines[-2]) not in changed:
                    body[at : at + length] = [call(*lines)]
                    found[norm[0]] = found.get(norm[0], False) or length == 3
                    break
    ast.fix_missing_locations(tree)
    return found


def _changed(node: ast.AST) -> str | None:
    """What `x += y`, `x[0] = y` or `x.add_(y)` changes in place."""
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node.value)
    method = node.func if isinstance(node, ast.Call) else None
    in_place = isinstance(method, ast.Attribute) and method.attr.endswith("_") and not method.attr.endswith("__")
    return ast.unparse(method.value) if in_place else None  # type: ignore[union-attr]


def _assigned(node: ast.AST) -> str | None:
    """The one name that a statement assigns."""
    simple = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return node.targets[0].id if simple else None  # type: ignore[attr-defined]


def _norm(node: ast.AST) -> tuple[str, str] | None:
    """(name of a module, argument) of `x = self.module(argument)`."""
    call = node.value if isinstance(node, ast.Assign) else None
    if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        return None
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(call.func, ast.Attribute) or not isinstance(owner, ast.Name) or owner.id != "self":
        return None
    return call.func.attr, call.args[0].id


def _is_sum(first: ast.AST, second: ast.AST, third: ast.AST) -> bool:
    """Whether the sum of the first line is kept by the second, and normalised and forgotten by the third."""
    total = _assigned(first)
    added = isinstance(first, ast.Assign) and isinstance(first.value, ast.BinOp) and isinstance(first.value.op, ast.Add)
    if total is None or not added:
        return False
    parts = (first.value.left, first.value.right)  # type: ignore[attr-defined]
    named = any(isinstance(part, ast.Name) for part in parts)
    # the call computes its parts in another order, which nobody sees unless one assigns what the other reads
    assigns = any(isinstance(node, ast.NamedExpr) for part in parts for node in ast.walk(part))
    return named and not assigns and _is_kept(second, third) and _assigned(third) == total


def _is_kept(first: ast.AST, second: ast.AST) -> bool:
    """Whether what the first line keeps is normalised and forgotten by the second."""
    kept, norm = _assigned(first), _norm(second)
    named = isinstance(first, ast.Assign) and isinstance(first.value, ast.Name)
    if kept is None or norm is None or not named:
        return False
    source: str = first.value.id  # type: ignore[attr-defined]
    return kept != source and source == norm[1] == _assigned(second)


def _sum(first: Any, second: Any, third: Any) -> ast.Assign:
    left, right = first.value.left, first.value.right
    residual, other = (left, right) if isinstance(left, ast.Name) else (right, left)
    return _call(second, third, other, ast.keyword("residual", residual))


def _keep(first: Any, second: Any) -> ast.Assign:
    return _call(first, second, second.value.args[0], ast.keyword("keeps", ast.Constant(True)))


def _call(kept: Any, norm: Any, argument: ast.expr, keyword: ast.keyword) -> ast.Assign:
    """normalised, kept = norm(argument, keyword)."""
    targets = ast.Tuple([norm.targets[0], kept.targets[0]], ast.Store())
    return ast.copy_location(ast.Assign([targets], ast.Call(norm.value.func, [argument], [keyword])), kept)


def _function(tree: ast.Module, forward: types.FunctionType) -> Callable[..., Any]:
    """The function of a tree, with the names and defaults of the one that it was read from."""
    code = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    code.decorator_list = []
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)  # an error shows the line of the class's own
    made: Callable[..., Any] = copied(forward, code=code_of(tree, forward))
    return made
