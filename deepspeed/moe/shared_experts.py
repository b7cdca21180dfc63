"""Shared experts of a block, which see every token: computed while tokens travel to the others.

A block calls its shared expert by its own code. Where it does so after the experts that are spread, and with the tokens
that it was given, the result is computed before, while tokens travel. Where it calls it first and uses the result only
behind the experts, it gets a `LazyOutput`. Which of the two it is, is read from the source and not learned in the first
pass: a recomputation must repeat that one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map

from deepspeed.errors import UsageError
from deepspeed.log import warn_once
from deepspeed.transformers.replacement import class_before
from deepspeed.transformers.source import assigned, called_on_self, changed_in_place, tree_of

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
    if tree is None or known is None or any(changed_in_place(node) is not None for node in ast.walk(tree)):
        return ()
    return tuple(
        call.name
        for call in calls
        if call.simple and call.end < known.begin and _once(calls, call.name) is call and _waits(tree, call, known.end)
    )


def _tree(block: type[nn.Module]) -> ast.AST | None:
    """The source of a block's forward; None if it is not known, or does something again and again."""
    tree = tree_of(inspect.unwrap(block.forward))
    return None if tree is None or any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(tree)) else tree


def _calls(tree: ast.AST) -> Iterator[_Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := called_on_self(node)) is not None:
            end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
            yield _Call(name, _begin(node), end, node)


def _once(calls: list[_Call], name: str) -> _Call | None:
    found = [call for call in calls if call.name == name]
    return found[0] if len(found) == 1 else None


def _waits(tree: ast.AST, call: _Call, end: Place) -> bool:
    """True if the result of a call is needed behind a place only, and there by what knows promises."""
    lines = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.value is call.node)
    variable = next(map(assigned, lines), None)
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


_VIEWS = frozenset(["ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"])


def compute_ahead(block: nn.Module, experts: str) -> SharedExpertAhead | None:
    """What computes the shared expert of a block while the tokens of `block.<experts>` travel; None: it has none."""
    before = called_before(type(block), experts)
    for name in (*before, *called_after(type(block), experts)):
        module = getattr(block, name, None)
        if isinstance(module, nn.Module) and "shared" in name and not name.endswith("gate"):
            ahead = SharedExpertAhead(f"{type(block).__name__}.{name}", module, promises=name in before)
            module.__class__ = class_before(_Shared, type(module), "Ahead")
            module.ahead = ahead  # type: ignore[assignment]
            block.register_forward_pre_hook(ahead.note, with_kwargs=True)
            block.register_forward_hook(ahead.forget, always_call=True)
            return ahead
    return None


class SharedExpertAhead:
    """The result of a shared expert, from the travel of the tokens to the block's own call, or the other way round."""

    def __init__(self, path: str, module: nn.Module, *, promises: bool = False) -> None:
        """`promises`: the block calls before tokens travel."""
        self._path, self._module, self._promises = path, module, promises
        self._inside = False
        self._given: Tensor | None = None
        self._version = 0
        self._result: Tensor | None = None
        self._promise: LazyOutput | None = None

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        self._inside, self._given = True, given if isinstance(given, Tensor) else None

    def forget(self, *_: Any) -> None:
        self._inside, self._given, self._result, self._promise = False, None, None, None

    def __call__(self) -> None:
        """Compute; done while tokens travel."""
        if self._promise is not None:
            self._promise.kept()
        elif self._given is not None and not self._promises:
            result = plain_call(self._module, self._given)
            self._result = result if isinstance(result, Tensor) else None
            self._version = _version(self._given)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block gets for its call: what was computed, a promise of it, or what is computed now."""
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        if self._promises and self._inside and alone and self._promise is None:
            self._promise = LazyOutput.of(self._path, self._module, args[0])
            return self._promise
        found = self.take(args[0]) if alone else None
        return plain_call(self._module, *args, **kwargs) if found is None else found

    def take(self, asked: Tensor) -> Tensor | None:
        """The result for what the block asks for; None if there is none, or it is for other values."""
        result, given = self._result, self._given
        self._result = None
        if result is None or given is None:
            return None
        if _version(given) == self._version and _same(given, asked):
            return result.view(*asked.shape[:-1], result.shape[-1])
        warn_once(
            f"{self._path} is computed while tokens travel, but its block calls it with other values than it was "
            "given; it is computed twice"
        )
        return None


class LazyOutput(Tensor):
    """The result of a module for a tensor, computed once: when it is asked to, or when torch needs it."""

    path: str
    module: nn.Module
    given: Tensor | None
    version: int
    result: Any

    @classmethod
    def of(cls, path: str, module: nn.Module, given: Tensor) -> LazyOutput:
        made: LazyOutput = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.path, made.module, made.given, made.version, made.result = path, module, given, _version(given), None
        return made

    def kept(self) -> Any:
        if self.given is not None:
            if _version(self.given) != self.version:
                raise UsageError(
                    f"{self.path} is computed while tokens travel, but the tokens that its block called it with have "
                    "been changed in place since; let the block compute new ones"
                )
            given, self.given = self.given, None
            self.result = plain_call(self.module, given)
        return self.result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_kept, args), **tree_map(_kept, kwargs or {}))


def _kept(value: Any) -> Any:
    return value.kept() if isinstance(value, LazyOutput) else value


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module.__call__(module, *args, **kwargs)


class _Shared(nn.Module):
    """Put before the class of a shared expert: what was computed ahead is taken."""

    ahead: SharedExpertAhead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ahead.answer(args, kwargs)


def _version(tensor: Tensor) -> int:
    """How often its values have been changed in place; torch does not count that of inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def _same(one: Tensor, other: Tensor) -> bool:
    """True for tensors of the same rows, by memory and by where their gradients go."""
    alike = one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype
    rows = one.shape[-1:] == other.shape[-1:] and one.is_contiguous() and other.is_contiguous()
    return alike and rows and one.requires_grad == other.requires_grad and _origin(one) == _origin(other)


def _origin(tensor: Tensor) -> tuple[Node | None, int] | int:
    """What made a tensor, past views; of a leaf itself."""
    if tensor.grad_fn is None:
        return id(tensor) if tensor.requires_grad else 0
    node: Node | None = tensor.grad_fn
    number = tensor.output_nr
    while node is not None and node.name() in _VIEWS:
        node, number = node.next_functions[0]
    if node is not None and node.name() == "torch::autograd::AccumulateGrad":
        return id(node.variable)  # type: ignore[attr-defined]
    return node, number
