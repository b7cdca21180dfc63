"""`Router`: which replica gets a prompt. The one that has its prefix, unless it has much more to do than others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

_CHUNK = 64  # tokens
_REMEMBERED = 1 << 16  # prefixes
_SLACK = 4  # requests that the replica with the prefix may have more than twice what the idlest has


class _Loaded(Protocol):
    @property
    def load(self) -> int: ...


class Router:
    """Remembers which replica computed which prefixes last."""

    def __init__(self, replicas: Sequence[_Loaded]) -> None:
        self._replicas = replicas
        self._homes: OrderedDict[int, int] = OrderedDict()  # chained hash of whole chunks → replica

    def choose(self, prompt: Sequence[int]) -> int:
        """The replica for a prompt, as its place in the list."""
        if len(self._replicas) == 1:
            return 0
        loads = [replica.load for replica in self._replicas]
        idlest = min(range(len(loads)), key=loads.__getitem__)
        prefixes = _prefixes(prompt)
        home = next((self._homes[each] for each in reversed(prefixes) if each in self._homes), idlest)
        chosen = home if loads[home] <= 2 * loads[idlest] + _SLACK else idlest
        for each in prefixes:
            self._homes[each] = chosen
            self._homes.move_to_end(each)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen


def _prefixes(prompt: Sequence[int]) -> list[int]:
    """A hash of each prefix that is a number of whole chunks."""
    found, before = [], 0
    for start in range(0, len(prompt) - _CHUNK + 1, _CHUNK):
        before = hash((before, tuple(prompt[start : start + _CHUNK])))
        found.append(before)
    return found
