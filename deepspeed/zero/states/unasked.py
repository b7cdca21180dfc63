"""`Unasked`: the norm of the last step, which nobody need ask for, is found before the next one and before the end.

Where nothing depends on a norm a step does not wait for it, and most of them nobody ever reads. Their reductions must
be completed all the same: a failed one is told, and a rank that ended in the middle of one would look lost to others.
"""

from __future__ import annotations

import os
import weakref
from datetime import timedelta

from torch import Tensor

from deepspeed.comm import Pending
from deepspeed.errors import CommError
from deepspeed.log import logger

__all__ = ["Unasked"]

_AT_THE_END = timedelta(seconds=10)  # for ranks that are behind; a process whose peers are stuck must end, too


class Unasked:
    """Keeps the norm that is being found until it is complete."""

    def __init__(self) -> None:
        self._kept: list[Pending[Tensor]] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._kept)

    @property
    def last(self) -> Pending[Tensor] | None:
        """The norm of the last step; None before the first."""
        return self._kept[-1] if self._kept else None

    def begun(self, norm: Pending[Tensor]) -> None:
        """The reduction of a norm has begun; that of the one before is complete."""
        self._kept[:] = [norm]

    def complete(self) -> None:
        """Wait for the last norm; an error says which reduction failed."""
        if self._kept:
            self._kept[-1].wait()

    def close(self) -> None:
        """As `complete`, for good: a failure is only logged, since nobody asks any more."""
        self._end()


def _end(process: int, kept: list[Pending[Tensor]]) -> None:
    last = kept.pop() if kept else None
    if last is None or os.getpid() != process:  # a fork has not begun it
        return
    try:
        last.wait(_AT_THE_END)
    except CommError as error:
        logger.warning("the norm of the last step's gradients was not found: %s", error)
