"""`Comings`: whether more may come of a gradient in the backward that runs.

[Note: when a gradient is whole] A parameter's hook is called after autograd has summed what one backward gives it; its
weight is then not needed any more. Only a backward inside the backward (reentrant checkpointing) may bring more later.
So a gradient is whole when it has come as often as in the last backward; in the first one, if it came in the outer
backward and its parameter has one name only. Of everything else that is known when the backward is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

__all__ = ["Comings"]

# The number of the backward that is running in this thread, -1 outside one; nested ones have their own.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Comings:
    """Counts gradients; see [Note: when a gradient is whole]."""

    def __init__(self, params: Callable[[], Iterable[nn.Parameter]]) -> None:
        """`params` are the model's, tied ones as often as named."""
        self._params = params
        self._seen: Counter[int] = Counter()
        self._expected: Counter[int] | None = None
        self._whole: set[int] = set()
        self._shared: frozenset[int] = frozenset()
        self._task = -1

    def begin(self) -> None:
        """Called from inside the outer backward, before any gradient comes."""
        names = Counter(id(param) for param in self._params())
        self._shared = frozenset(key for key, count in names.items() if count > 1)
        self._seen.clear()
        self._whole.clear()
        self._task = _graph_task()

    def end(self) -> None:
        """The backward is over."""
        if self._seen:
            self._expected = Counter(self._seen)

    def note(self, param: nn.Parameter) -> None:
        """A gradient has come, or more of it."""
        key = id(param)
        self._seen[key] += 1
        known = None if self._expected is None else self._expected.get(key)
        if known is None:
            known = 1 if _graph_task() == self._task and key not in self._shared else None
        if known is not None and self._seen[key] >= known:
            self._whole.add(key)

    def is_whole(self, param: nn.Parameter) -> bool:
        """True if nothing more comes of a gradient."""
        return id(param) in self._whole
