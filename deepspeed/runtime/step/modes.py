"""`train()` and `eval()` of schedule-free optimizers, which exchange weights in place: the model follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from deepspeed.zero.states.states import States

__all__ = ["Modes"]

_NAMES = ("train", "eval")


class Modes:
    """Watches those methods of an optimizer over masters, also where a client calls them on the optimizer itself.

    Comparing version counters before the next forward would find the exchange too, but ranks that hold no element
    would not, and publishing needs all of them.
    """

    def __init__(self, optimizer: Optimizer, states: States) -> None:
        self._optimizer = optimizer
        self._states = states
        self._watched = [name for name in _NAMES if callable(getattr(optimizer, name, None))]
        for name in self._watched:
            setattr(optimizer, name, self._following(getattr(optimizer, name)))

    def _following(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def follow(*args: Any, **kwargs: Any) -> Any:
            self._states.adopt_edits()
            result = method(*args, **kwargs)
            self._states.publish()
            return result

        return follow

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for name in self._watched:
            vars(self._optimizer).pop(name, None)
        self._watched.clear()
