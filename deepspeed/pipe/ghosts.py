"""Views of a model in which its blocks are ghosts, so that its own forward tells what blocks are called with.

[Note: the model's own code] Nothing of a model is written again. Its forward runs over a view: copies of the containers
around its blocks, with ghosts in the place of blocks. Stopped at a ghost, it has computed embeddings, masks and
positions; run to the end with a ghost that gives out the hidden states of another stage, it computes norm and head.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import UsageError

__all__ = ["BLOCK_INPUT", "Blank", "Call", "Ghosts", "view_of"]

BLOCK_INPUT = "input_ids"
"""What a tensor alone means as the input of a model."""
_HIDDEN = "hidden_states"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Call:
    """How a model calls a block, but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool
    """Hidden states are passed by their name."""

    def run(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call a block so."""
        if self.by_name:
            return block(**{_HIDDEN: hidden}, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)


class _Stop(Exception):
    """Ends a forward that has told enough."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Ghosts:
    """Stand in for the blocks of a model: note how they are called, and compute nothing."""

    def __init__(self, blocks: nn.Module) -> None:
        self.modules = _twin(blocks)
        children = blocks._modules.items()
        self.modules._modules = {name: self._ghost(int(name), block) for name, block in children if block is not None}
        self._last = len(self.modules._modules) - 1
        self._calls: list[Call] = []
        self._stop_at = -1
        self._tuples = False
        self._given: Tensor | None = None

    def until(
        self, number: int, view: nn.Module, inputs: Mapping[str, Any], *, tuples: bool
    ) -> tuple[Tensor, list[Call]]:
        """Run a view until it calls a block: the hidden states at that point, and the calls until then."""
        self._calls, self._stop_at, self._tuples, self._given = [], number, tuples, None
        try:
            _forward(view, inputs)
        except _Stop as stop:
            return stop.hidden, self._calls
        finally:
            self._calls = []
        raise UsageError(f"the forward of {type(view).__name__} does not call its blocks one after another")

    def pass_by(self, view: nn.Module, inputs: Mapping[str, Any], hidden: Tensor, *, tuples: bool) -> Any:
        """Run a view to its end, as if the last block had given these hidden states."""
        self._calls, self._stop_at, self._tuples, self._given = [], -1, tuples, hidden
        try:
            return _forward(view, inputs)
        finally:
            self._calls, self._given = [], None

    def _ghost(self, number: int, block: nn.Module) -> nn.Module:
        ghost = _twin(block)
        ghost._modules, ghost._buffers = {}, {}
        ghost.forward = partial(self._called, number)
        return ghost

    def _called(self, number: int, *args: Any, **kwargs: Any) -> Any:
        by_name = not args
        hidden = kwargs.pop(_HIDDEN) if by_name else args[0]
        self._calls.append(Call(args[1:], kwargs, by_name))
        if number == self._stop_at:
            raise _Stop(hidden)
        if number == self._last and self._given is not None:
            hidden = self._given
        return (hidden,) if self._tuples else hidden


class Blank(nn.Module):
    """In place of a module with weights that another stage has: gives out zeros of the shape that it would."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
        self._adds = isinstance(module, nn.Embedding)
        self.like: Tensor | None = None
        """Whose dtype and device they have."""

    def forward(self, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros."""
        assert self.like is not None, "set before a view runs"
        shape = value.shape if self._adds else value.shape[:-1]
        width = value.shape[-1] if self._width is None else self._width
        return self.like.new_zeros(()).expand(*shape, width)


def view_of(model: nn.Module, containers: Sequence[str], instead: Mapping[str, nn.Module], at: str = "") -> nn.Module:
    """A copy of a model's containers, with other modules at some paths."""
    view = _twin(model)
    for name, child in model._modules.items():
        path = f"{at}.{name}" if at else name
        if path in instead:
            view._modules[name] = instead[path]
        elif path in containers and child is not None:
            view._modules[name] = view_of(child, containers, instead, path)
    return view


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same attributes and submodules, but no hooks and no parameters of its own."""
    twin = copy.copy(module)
    twin._modules, twin._buffers, twin._parameters = dict(module._modules), dict(module._buffers), {}
    for hooks in _HOOKS:
        setattr(twin, hooks, OrderedDict())
    twin.training = False
    return twin


def _forward(view: nn.Module, inputs: Mapping[str, Any]) -> Any:
    return view(**inputs, use_cache=False)
