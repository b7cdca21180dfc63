"""`WholeShapes`: for a while parameters that are let go keep their shapes, without memory.

A compiled graph takes parameters as inputs of the shapes that they had when it was captured, and gathers them itself.
Outside of such a while a parameter that is not whole is empty, so that no code reads memory that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from deepspeed.zero.parameters.data import show
from deepspeed.zero.parameters.shard import Shard, empty_of


class WholeShapes:
    """Counts how often it was entered; the first time and the last one change parameters."""

    def __init__(self, shards: Callable[[], Iterable[Shard]]) -> None:
        self._shards = shards
        self._depth = 0
        self._empty: list[tuple[Shard, Tensor | None]] = []

    def enter(self) -> None:
        """Parameters that are not whole have their shapes from now on."""
        self._depth += 1
        if self._depth > 1:
            return
        self._empty = [(shard, shard.nothing) for shard in self._shards() if not shard.persistent and not shard.alone]
        for shard, _ in self._empty:
            shard.nothing = shard.full
            if not shard.whole:
                show(shard.param, shard.full)

    def leave(self) -> None:
        """They are empty again."""
        self._depth -= 1
        if self._depth:
            return
        for shard, before in self._empty:
            shard.nothing = before
            if not shard.whole:
                show(shard.param, empty_of(shard))
        self._empty.clear()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()
