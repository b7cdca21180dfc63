"""`Store`: where the states of a tile are between steps; and the pipeline that fetches, uses and keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from deepspeed.comm import Pending

__all__ = ["AtHome", "Store", "through"]

T = TypeVar("T")
Tile = TypeVar("Tile", contravariant=True)


class Store(Protocol[Tile]):
    """Keeps masters and moments of tiles in a tier; what was fetched stays where it is until it is kept again."""

    def fetch(self, tile: Tile) -> Pending[None]:
        """Begin to bring the states of a tile to where the optimizer works."""

    def keep(self, tile: Tile) -> Pending[None]:
        """Begin to put them back, changed."""


class AtHome:
    """States that lie where the optimizer works: nothing moves."""

    def fetch(self, tile: object) -> Pending[None]:
        """See `Store`."""
        return Pending(None)

    def keep(self, tile: object) -> Pending[None]:
        """See `Store`."""
        return Pending(None)


def through(tiles: Sequence[T], store: Store[T], work: Callable[[T], None], *, ahead: int = 1, behind: int = 1) -> None:
    """Work on every tile in order: `ahead` of them are being fetched, and `behind` kept, while one is worked on."""
    fetched = deque(store.fetch(tile) for tile in tiles[: ahead + 1])
    kept: deque[Pending[None]] = deque()
    for place, tile in enumerate(tiles):
        if not fetched:
            fetched.append(store.fetch(tile))
        fetched.popleft().wait()
        work(tile)
        kept.append(store.keep(tile))
        while len(kept) > behind:
            kept.popleft().wait()
        if ahead and place + ahead + 1 < len(tiles):
            fetched.append(store.fetch(tiles[place + ahead + 1]))
    while kept:
        kept.popleft().wait()
