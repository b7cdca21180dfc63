"""Guesses of what comes next, which one forward verifies: n-grams of the sequence itself, or a smaller model.

[Note: exact speculation] A token is a function of the logits, the seed of its sequence and its position
(`ops/generate/sampling.py`). A guess is accepted if it is the token that the model draws at its position, so that
sequences are the same as without guesses, greedy or not. The smaller model draws with the same seed and position: it
guesses right as often as the two distributions allow for one draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deepspeed.generate.sequence import Sequence as Generated

_LONGEST, _SHORTEST = 4, 2
_LOOK_BACK = 2048
_FEW = 32
"""Sequences of a step up to which guesses cost little, because reading the weights takes longest."""


class Drafter(Protocol):
    """Proposes tokens for sequences whose known tokens but the last are computed."""

    def propose(self, sequences: Sequence[Generated], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Guesses by uid; none where guessing does not pay."""

    def forget(self, uid: int) -> None:
        """A sequence has ended."""

    def close(self) -> None:
        """Free what it holds."""


class NgramDrafter:
    """What followed the same last tokens before."""

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, sequences: Sequence[Generated], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        if len(sequences) > _FEW:
            return {}
        return {each.uid: follow(each.tokens, self._count) for each in sequences}

    def forget(self, uid: int) -> None:
        pass

    def close(self) -> None:
        pass


def follow(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens after the latest earlier place where the last few tokens are found; the longest match counts."""
    recent = list(tokens[-_LOOK_BACK:])
    for size in range(min(_LONGEST, len(recent) - 1), _SHORTEST - 1, -1):
        last, first = recent[-size:], recent[-size]
        for begin in range(len(recent) - size - 1, -1, -1):
            if recent[begin] == first and recent[begin : begin + size] == last:
                return recent[begin + size : begin + size + count]
    return []
