"""Shared experts of a block, which see every token: computed while tokens travel to the others.

[Note: shared experts] A block calls its shared expert itself, by its own code. Where that code calls it after the
experts that are spread, and with the tokens that the block was given, the result can be had before: it is computed
between the leaving and the arriving of the tokens, and is there when the block asks. Whether the code is of that kind
is read from its source, and not learned on the way: a recomputation must do what the first pass did.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from deepspeed.log import warn_once

__all__ = ["Ahead", "called_after", "compute_ahead"]

_VIEWS = frozenset(["ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"])


def compute_ahead(block: nn.Module, experts: str) -> Ahead | None:
    """What computes the shared expert of a block while the tokens of `block.<experts>` travel; None: it has none."""
    for name in called_after(type(block), experts):
        module = getattr(block, name, None)
        if isinstance(module, nn.Module) and "shared" in name and not name.endswith("gate"):
            ahead = Ahead(f"{type(block).__name__}.{name}", module)
            module.__class__ = _class_of(type(module))  # type: ignore[arg-type]
            module.ahead = ahead  # type: ignore[assignment]
            block.register_forward_pre_hook(ahead.note, with_kwargs=True)
            block.register_forward_hook(ahead.forget, always_call=True)
            return ahead
    return None


def called_after(block: type[nn.Module], experts: str) -> tuple[str, ...]:
    """What of its own a block's code calls once, with one argument, behind its only call of `self.<experts>`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(block.forward))))
    except (OSError, TypeError, SyntaxError):
        return ()
    calls: dict[str, list[tuple[tuple[int, int], bool]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            return ()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                place = node.lineno, node.col_offset
                calls.setdefault(node.func.attr, []).append((place, len(node.args) == 1 and not node.keywords))
    first = calls.get(experts, [])
    if len(first) != 1:
        return ()
    return tuple(name for name, found in calls.items() if len(found) == 1 and found[0][1] and found[0][0] > first[0][0])


class Ahead:
    """The result of a shared expert, from the travel of the tokens to the block's own call."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path, module
        self._given: Tensor | None = None
        self._version = 0
        self._result: Tensor | None = None

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The block begins with these."""
        given = args[0] if args else kwargs.get("hidden_states")
        self._given = given if isinstance(given, Tensor) else None

    def forget(self, *_: Any) -> None:
        """The block is through."""
        self._given = self._result = None

    def __call__(self) -> None:
        """Compute; done while tokens travel."""
        if self._given is not None:
            result = plain_call(self._module, self._given)
            self._result = result if isinstance(result, Tensor) else None
            self._version = self._given._version

    def take(self, asked: Any) -> Tensor | None:
        """The result for what the block asks for; None if there is none, or it is for other values."""
        result, given = self._result, self._given
        self._result = None
        if result is None or given is None:
            return None
        if isinstance(asked, Tensor) and given._version == self._version and _same(given, asked):
            return result.view(*asked.shape[:-1], result.shape[-1])
        warn_once(
            f"{self._path} is computed while tokens travel, but its block calls it with other values than it was "
            "given; it is computed twice"
        )
        return None


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own call, with its hooks."""
    return nn.Module.__call__(module, *args, **kwargs)


class _Shared(nn.Module):
    """Put before the class of a shared expert: what was computed ahead is taken."""

    ahead: Ahead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.ahead.take(args[0]) if len(args) == 1 and not kwargs else None
        return plain_call(self, *args, **kwargs) if found is None else found


@functools.cache
def _class_of(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Ahead{original.__name__}", (_Shared, original), {"__module__": __name__})


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
