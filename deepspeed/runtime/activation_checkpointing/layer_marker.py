"""Transformers' layers tell which tensor they are about to save, while an offload of hidden states is open."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from deepspeed.runtime.activation_checkpointing.structure import CheckpointingError

__all__ = ["MARKER", "Layer", "LayerMarker", "Marks", "layer_class"]

_MODULE, _CLASS = "transformers.modeling_layers", "GradientCheckpointingLayer"


Layer = Callable[[torch.Tensor], Any]
"""A layer with all of its arguments but the first."""


class Marks(Protocol):
    """Who wants to know."""

    def enter(self, tensor: torch.Tensor, layer: Layer) -> None:
        """This tensor is a layer's input."""

    def leave(self, result: Any) -> None:
        """The layer entered last returned this."""


def layer_class() -> Any:
    """The class of Transformers' checkpointed layers; None where it is not loaded, so that no model has any."""
    return getattr(sys.modules.get(_MODULE), _CLASS, None)


class LayerMarker:
    """Wraps the call of Transformers' checkpointed layers while anybody wants marks, or from `install` on for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._here = threading.local()

    def install(self) -> None:
        """Wrap the layers for as long as the process lives; a second time changes nothing."""
        try:
            from transformers.modeling_layers import GradientCheckpointingLayer  # an optional dependency
        except ImportError as error:
            raise CheckpointingError(
                f"found no transformers with {_CLASS} ({error}), whose layers are to be marked; install "
                "transformers 4.52 or later, or call mark() on the input of every checkpointed layer"
            ) from error
        with self._lock:
            self._users += 1
            self._wrap(GradientCheckpointingLayer)

    def open(self, marks: Marks) -> None:
        """From now on, layers that this thread calls mark their inputs there."""
        # A model of Transformers can only exist where the module is loaded; nothing else is worth loading it.
        layer = layer_class()
        with self._lock:
            self._users += 1
            if layer is not None:
                self._wrap(layer)
        self._opened.append(marks)

    def close(self) -> None:
        """The one opened last by this thread wants no more marks."""
        self._opened.pop()
        with self._lock:
            self._users -= 1
            layer = layer_class()
            if self._users == 0 and layer is not None and self._wrapper is not None:
                if layer.__call__ is self._wrapper:  # else somebody wrapped it once more, and ours does nothing
                    layer.__call__ = self._original
                self._wrapper = self._original = None

    @property
    def _opened(self) -> list[Marks]:
        found: list[Marks] = self._here.__dict__.setdefault("opened", [])
        return found

    def _wrap(self, layer: Any) -> None:
        if self._wrapper is not None:
            return
        original = layer.__call__

        @functools.wraps(original)
        def marked(module: Any, *args: Any, **kwargs: Any) -> Any:
            saves = bool(self._opened and args and module.gradient_checkpointing and module.training)
            if not saves or not isinstance(args[0], torch.Tensor):
                return original(module, *args, **kwargs)
            marks, others = self._opened[-1], args[1:]  # what runs the layer again must not hold its input
            marks.enter(args[0], lambda hidden: original(module, hidden, *others, **kwargs))
            result = original(module, *args, **kwargs)
            marks.leave(result)
            return result

        self._original, self._wrapper = original, marked
        layer.__call__ = marked


MARKER = LayerMarker()
