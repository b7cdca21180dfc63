"""The settings that CPU optimizers keep between calls, by the number that their caller chose."""

from __future__ import annotations

from typing import Generic, TypeVar

from deepspeed.errors import UsageError

__all__ = ["Handles"]

T = TypeVar("T")


class Handles(Generic[T]):
    """Settings by number: made once, read at every update, dropped by their maker."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._made: dict[int, T] = {}

    def make(self, number: int, settings: T) -> int:
        """Keep settings under a number, in place of older ones; 0 is success."""
        self._made[number] = settings
        return 0

    def get(self, number: int) -> T:
        """The settings under this number."""
        if number not in self._made:
            raise UsageError(
                f"{self._op}: there is no optimizer {number}; found {sorted(self._made)}. Create it before its update."
            )
        return self._made[number]

    def drop(self, number: int) -> int:
        """Forget the settings under this number, if there are any; 0 is success."""
        self._made.pop(number, None)
        return 0
