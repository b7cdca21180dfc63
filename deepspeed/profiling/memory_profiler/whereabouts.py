"""`Whereabouts`: which phase of a step and which module is running, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["ACTIVATIONS", "TEMPORARIES", "Place", "Whereabouts"]

ACTIVATIONS = "activations"
TEMPORARIES = "gradients of activations, temporaries"

_FORWARD, _BACKWARD, _BETWEEN = "forward", "backward", "between phases"
_SEEN = "_deepspeed_made_by_a_module"


@dataclass(frozen=True, slots=True)
class Place:
    """A moment of a step."""

    phase: str
    module: str | None
    """The path of the module, "" for the model itself; None: none is running."""
    makes: str
    """The kind of what is made there, unless it turns out to be something else."""


class Whereabouts:
    """Listens to the modules of a model from construction to `close`.

    In backward a module begins when the gradient of its output is there, and ends with those of its inputs: hooks of
    tensors, since those of modules put nodes into the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.phases: list[str] = []
        self._running: list[str] = []
        self._back: str | None = None
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            begin, end = self._begins(name), self._ends(name)
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def now(self) -> Place:
        """Where the step is."""
        told = self.phases[-1] if self.phases else None
        if self._running:  # in backward: computed again
            return Place(told or _FORWARD, self._running[-1], ACTIVATIONS)
        if told == _BACKWARD or (told is None and self._back is not None):
            return Place(_BACKWARD, self._back, TEMPORARIES)
        return Place(told or _BETWEEN, None, ACTIVATIONS if told in (_FORWARD, None) else TEMPORARIES)

    def enter(self, phase: str) -> None:
        """A phase begins."""
        if phase != _BACKWARD or _BACKWARD not in self.phases:
            self._back = None
        self.phases.append(phase)

    def leave(self) -> None:
        """The innermost phase is over."""
        if self.phases and self.phases.pop() == _BACKWARD and _BACKWARD not in self.phases:
            self._back = None

    def _begins(self, name: str) -> Callable[..., None]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not name:
                self._back = None  # another forward
            self._running.append(name)
            for tensor in _differentiable((args, kwargs)):
                tensor.register_hook(lambda _: self._came_out(name))

        return begin

    def _ends(self, name: str) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, out: Any) -> None:
            while self._running and self._running.pop() != name:
                pass  # modules that ended by an exception
            for tensor in _differentiable(out):
                if not hasattr(tensor, _SEEN):  # what a module hands through was made by one inside it
                    setattr(tensor, _SEEN, True)
                    tensor.register_hook(lambda _: self._came_in(name))

        return end

    def _came_in(self, name: str) -> None:
        self._back = name

    def _came_out(self, name: str) -> None:
        if self._back == name:
            self._back = name.rpartition(".")[0] if name else None


def _differentiable(values: Any) -> Iterator[Tensor]:
    """Tensors that a backward comes to; a wrapper that computes what it is asked for (lazy logits) is left alone."""
    if torch.is_grad_enabled():
        for leaf in tree_leaves(values):
            plain = isinstance(leaf, Tensor) and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
            if plain and leaf.requires_grad:
                yield leaf
