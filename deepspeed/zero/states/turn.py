"""`Turn`: the update of one tile in one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock
from typing import Any

from torch import Tensor

from deepspeed.zero.states.tiles import Tile

__all__ = ["Turn", "Turns"]


class Turn:
    """A tile with the gradients of a step. `wait` returns when its weights are, or are queued, where they are used."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.pieces = [piece for piece in tile.pieces if piece.gradient is not None]
        self.grads: list[Tensor] = []
        self.take_gradients()
        self.factor: float | None = None
        """By which the host multiplies the gradients; None: by that of the step."""
        self.before: Callable[[], None] | None = None
        """What the host does first."""
        self.only_before = False
        """And nothing else: the weights stay."""
        self.after: Callable[[Sequence[Tensor]], None] | None = None
        """What is done with the new weights before they return to the device."""
        self._done = Event()
        self._error: BaseException | None = None
        self.sent: Any = None
        """The device's event behind the copy of the new weights."""
        self.kept: Any = None
        """The device's event behind the copy of the states, if they were on the device."""

    def take_gradients(self) -> None:
        """Those of this moment are the step's."""
        self.grads = [piece.gradient for piece in self.pieces if piece.gradient is not None]

    def finish(self, error: BaseException | None = None) -> None:
        """Let those who wait go on, or fail."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """See the class."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self.sent is not None:
            self.sent.wait()

    def settle(self) -> None:
        """As `wait`; and the memory of states and gradients is the host's again."""
        self.wait()
        if self.kept is not None:
            self.kept.synchronize()


class Turns:
    """Turns that two take from both ends until none is left."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._left = deque(turns)
        self._lock = Lock()

    def first(self) -> Turn | None:
        """The next one in order."""
        with self._lock:
            return self._left.popleft() if self._left else None

    def last(self) -> Turn | None:
        """The one that is needed last."""
        with self._lock:
            return self._left.pop() if self._left else None
