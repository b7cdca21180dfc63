"""Guesses of what comes next, which one forward verifies: n-grams of the sequence itself, or a smaller model.

[Note: exact speculation] A token is a function of the logits, the seed of its sequence and its position
(`ops/generate/sampling.py`). A guess is accepted if it is the token that the model draws at its position, so that
sequences are the same as without guesses, greedy or not. The smaller model draws with the same seed and position: it
guesses right as often as the two distributions allow for one draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed.generate.runner import Runner
from deepspeed.generate.sampler import Sampler
from deepspeed.generate.scheduler import ScheduledWork
from deepspeed.generate.sequence import Sequence as Generated

_LONGEST, _SHORTEST = 4, 2
_LOOK_BACK = 2048
FEW = 32
"""Sequences of a step up to which guesses cost little, because reading the weights takes longest."""


class Drafter(ABC):
    """Proposes tokens for sequences whose known tokens but the last are computed."""

    runner: Runner | None = None
    """Of a model of its own."""

    @abstractmethod
    def propose(self, sequences: Sequence[Generated], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Guesses by uid; none where guessing does not pay."""

    def forget(self, uid: int) -> None:  # noqa: B027
        """Drop what is kept of a sequence, which has ended or is computed again."""


class NgramDrafter(Drafter):
    """What followed the same last tokens before."""

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, sequences: Sequence[Generated], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        if len(sequences) > FEW:
            return {}
        return {each.uid: follow(each.tokens, self._count) for each in sequences}


def follow(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens after the latest earlier place where the last few tokens are found; the longest match counts."""
    recent = list(tokens[-_LOOK_BACK:])
    for size in range(min(_LONGEST, len(recent) - 1), _SHORTEST - 1, -1):
        last, first = recent[-size:], recent[-size]
        for begin in range(len(recent) - size - 1, -1, -1):
            if recent[begin] == first and recent[begin : begin + size] == last:
                return recent[begin + size : begin + size + count]
    return []


@dataclass(slots=True)
class _Twin:
    """A sequence as the smaller model knows it."""

    place: int
    mirror: Generated
    """Its `tokens` are those whose keys and values are in the smaller model's cache, or will be, guesses included."""


class ModelDrafter(Drafter):
    """Guesses of a smaller model, which has a runner with a cache of its own."""

    runner: Runner

    def __init__(
        self, runner: Runner, sampler: Sampler, *, count: int, blocks: int, block_size: int, tokens: int
    ) -> None:
        self.runner, self._sampler, self._count = runner, sampler, count
        self._size, self._tokens = block_size, tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._places = list(range(FEW - 1, -1, -1))
        self._twins: dict[int, _Twin] = {}

    def propose(self, sequences: Sequence[Generated], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        if len(sequences) > FEW:
            return {}
        ready = [each for each in sequences if self._prepare(each)]
        if not ready:
            return {}
        drawn: list[torch.Tensor] = []
        last = self._catch_up(ready)
        for number in range(self._count):
            if number:
                last = [ScheduledWork(self._twin(each), len(each.tokens) + number - 1, 1, True) for each in ready]
            places = [self._twins[each.uid].place for each in ready]
            logits, batch = self.runner.run(last, places, _ends(last), places)
            rows = [(each, seeds.get(each.uid, 0), len(each.tokens) + number) for each in ready]
            result = self._sampler.draw(logits, rows)
            self.runner.pending.index_copy_(0, batch.targets[: len(rows)], result.tokens)
            drawn.append(result.tokens)
        guesses = torch.stack(drawn, 1).tolist()
        for each, found in zip(ready, guesses, strict=True):
            self._twin(each).tokens += found[:-1]  # the last guess was not computed
        return {each.uid: found for each, found in zip(ready, guesses, strict=True)}

    def _twin(self, sequence: Generated) -> Generated:
        return self._twins[sequence.uid].mirror

    def _prepare(self, sequence: Generated) -> bool:
        """Give a sequence a twin with room for its guesses; False where there is none."""
        twin = self._twins.get(sequence.uid)
        if twin is None:
            if not self._places:
                return False
            mirror = Generated(sequence.uid, [], sequence.params, blocks=[[]])
            twin = self._twins[sequence.uid] = _Twin(self._places.pop(), mirror)
        blocks, needed = twin.mirror.blocks[0], -(-(len(sequence.tokens) + self._count) // self._size)
        if needed - len(blocks) > len(self._free):
            return False
        blocks += [self._free.pop() for _ in range(needed - len(blocks))]
        same = 0
        for one, other in zip(twin.mirror.tokens, sequence.tokens, strict=False):
            if one != other:
                break
            same += 1
        long = len(sequence.tokens) + self._count > self.runner.entry.short_context
        twin.mirror.computed = min(same, len(sequence.tokens) - 1) if long is twin.mirror.long else 0
        twin.mirror.long = long
        twin.mirror.tokens = list(sequence.tokens)
        return True

    def _catch_up(self, ready: Sequence[Generated]) -> list[ScheduledWork]:
        """Compute what twins have missed, but for their last tokens: a step's work that gives the first guesses."""
        last: list[ScheduledWork] = []
        left = max(1, self._tokens // len(ready))
        for each in ready:
            mirror = self._twin(each)
            while len(mirror.tokens) - mirror.computed > left:
                work = ScheduledWork(
                    mirror, mirror.computed, min(self._tokens, len(mirror.tokens) - left - mirror.computed), False
                )
                self.runner.run([work], [self._twins[each.uid].place], [0], [])
                mirror.computed += work.count
            last.append(ScheduledWork(mirror, mirror.computed, len(mirror.tokens) - mirror.computed, True))
        return last

    def forget(self, uid: int) -> None:
        self._sampler.forget(uid)
        twin = self._twins.pop(uid, None)
        if twin is not None:
            self._places.append(twin.place)
            self._free += twin.mirror.blocks[0]


def _ends(work: Sequence[ScheduledWork]) -> list[int]:
    """The last token of each in the row of all."""
    found, end = [], 0
    for each in work:
        end += each.count
        found.append(end - 1)
    return found
