"""`Listener`: whom a layer of experts tells what its router chose; a copy of the layer tells nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Listener"]


class Listener:
    """Called with the assignments of each expert and, where some are dropped, which of them were kept."""

    def __init__(self, hear: Callable[[str, Tensor, Tensor | None], None], path: str) -> None:
        self._hear, self._path = hear, path

    def __call__(self, counts: Tensor, kept: Tensor | None = None) -> None:
        self._hear(self._path, counts, kept)

    def __deepcopy__(self, _: Any) -> None:
        return None
