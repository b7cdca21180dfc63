"""`Pack`: gradients that travel as one tensor, of which they are views afterwards.

A view takes longer to make than a small gradient takes to copy, so a pack of small ones keeps its tensor and its views
from step to step, as long as nobody else has kept one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["Pack"]

SMALL_BYTES = 16 << 10
"""Gradients up to this size on average keep their tensor: memory that is held between steps has to be worth it."""

_OURS = 2  # references to a view of which only this module has one: the list's and that of the call which counts


class Pack:
    """One tensor for gradients that are shaped `like` these; `again`: it may be used in the next step, too."""

    def __init__(self, like: Sequence[Tensor], *, again: bool) -> None:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in like)
        self._like = like
        self._keeps = again and nbytes <= SMALL_BYTES * len(like)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._users = (0, 0)

    def fill(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradients as one tensor."""
        flat: Tensor = _flatten_dense_tensors(grads)
        kept = self._flat
        return flat if kept is None or not self._is_ours(kept) else kept.copy_(flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in what `fill` made."""
        if flat is self._flat:
            return self._views
        views = list(_unflatten_dense_tensors(flat, self._like))
        if self._keeps:
            self._flat, self._views, self._users = flat, views, _users_of(flat)
        return views

    def _is_ours(self, flat: Tensor) -> bool:
        """Nobody has kept a gradient of the last step, or another view of its memory."""
        return _users_of(flat) == self._users and all(count == _OURS for count in map(sys.getrefcount, self._views))


def _users_of(tensor: Tensor) -> tuple[int, int]:
    """How many tensors share its memory, and how many names its storage has in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
