"""Sums that a layer adds before a normalisation, computed by its kernel.

The sum is between modules, in the layer's own forward, where no module could be replaced. So the forward is written
again, for layers in whose code these three lines follow each other, whatever their names are:

    hidden = residual + hidden               hidden, residual = self.norm(hidden, residual=residual)
    residual = hidden                   →
    hidden = self.norm(hidden)

Everything else of it stays, and so does the module of the norm, which is called as ever, for sharded weights. A
compiler sees the class's own forward, and so does whoever has put a hook on the norm.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from deepspeed.fusion.likeness import overridden
from deepspeed.fusion.swap import Refused, Swap, put_forward

__all__ = ["find_residual"]


def find_residual(module: nn.Module, norms: Mapping[nn.Module, Swap]) -> Swap | Refused | None:
    """How the sum before one of these norms, which run on kernels, is computed; None for modules without one."""
    names = {name for name, child in module.named_children() if child in norms}
    forward = type(module).forward
    if not names or not isinstance(forward, types.FunctionType):
        return None
    tree = _tree(forward)
    found = None if tree is None else _rewritten(tree, names)
    if tree is None or found is None:
        return None
    norm = module.get_submodule(found)
    if reason := overridden(module):
        return Refused(reason)
    if forward.__closure__:
        return Refused(f"the forward of {type(module).__name__} is wrapped, or uses names from around it")
    scene = norms[norm].scene
    put = partial(put_forward, module, _Layer(_function(tree, forward), found).run)
    return Swap(f"sum in {norms[norm].kernel}", put, None if scene is None else partial(scene, summed=True))


class _Layer:
    """A layer whose forward was written again."""

    def __init__(self, forward: Callable[..., Any], norm: str) -> None:
        self.forward, self.norm = forward, norm

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Hooks of others on the norm would see a norm that also adds; for them it stays what it was."""
        norm = module._modules[self.norm]
        hooks = (*norm._forward_hooks.values(), *norm._forward_pre_hooks.values())
        ours = all(str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)
        return (self.forward if ours else type(module).forward)(module, *args, **kwargs)


def _tree(forward: types.FunctionType) -> ast.Module | None:
    """The code of a function; None where there is none to read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def _rewritten(tree: ast.Module, names: Collection[str]) -> str | None:
    """Write the first sum before one of these norms again, in place; returns the norm's name, None if there is none."""
    for node in ast.walk(tree):
        found = getattr(node, "body", None)
        body: list[ast.stmt] = found if isinstance(found, list) else []
        for at in range(len(body) - 2):
            first, second, third = body[at : at + 3]
            norm = _norm(third)
            if norm is not None and norm[0] in names and _is_sum(first, second, third):
                body[at : at + 3] = [_call(first, second, third)]
                ast.fix_missing_locations(tree)
                return norm[0]
    return None


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
    total, kept = _assigned(first), _assigned(second)
    added = isinstance(first, ast.Assign) and isinstance(first.value, ast.BinOp) and isinstance(first.value.op, ast.Add)
    if total is None or kept is None or kept == total or not added:
        return False
    copied = isinstance(second, ast.Assign) and isinstance(second.value, ast.Name) and second.value.id == total
    parts = (first.value.left, first.value.right)  # type: ignore[attr-defined]
    norm = _norm(third)
    return (
        copied
        and any(isinstance(part, ast.Name) for part in parts)
        and norm is not None
        and norm[1] == total
        and _assigned(third) == total
    )


def _call(first: Any, second: Any, third: Any) -> ast.Assign:
    left, right = first.value.left, first.value.right
    residual, other = (left, right) if isinstance(left, ast.Name) else (right, left)
    targets = ast.Tuple([third.targets[0], second.targets[0]], ast.Store())
    called = ast.Call(third.value.func, [other], [ast.keyword("residual", residual)])
    return ast.copy_location(ast.Assign([targets], called), first)


def _function(tree: ast.Module, forward: types.FunctionType) -> Callable[..., Any]:
    """The function of a tree, with the names and defaults of the one that it was read from."""
    code = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    code.decorator_list = []
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)  # an error shows the line of the class's own
    outer = compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)
    inner = next(each for each in outer.co_consts if isinstance(each, types.CodeType))
    made = types.FunctionType(inner, forward.__globals__, forward.__name__, forward.__defaults__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
