"""A few numbers from every rank, on the hosts, in a few rounds of messages: what ranks agree by.

A backend's own all-gather or all-reduce of host tensors is a ring: as many hops one after the other as there are ranks.
Here the messages of one round go out side by side, and after each round a rank knows `RADIX` times as many numbers, so
that 1,024 ranks need 5 rounds and 16,384 need 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import Operation
from deepspeed.comm.pending import AllOf

__all__ = ["RADIX", "Message", "gather_words", "rounds", "schedule", "unite"]

RADIX = 4

Message = tuple[int, int]
"""(distance, rows): the rank that is so far behind gets the first so many rows, the one ahead sends as many."""

_run = DEFAULT.run


def schedule(size: int) -> Iterator[list[Message]]:
    """The messages of each round: after it, a rank knows the numbers of so many ranks from itself on."""
    known = 1
    while known < size:
        yield [(step * known, min(known, size - step * known)) for step in range(1, RADIX) if step * known < size]
        known = min(known * RADIX, size)


def rounds(size: int) -> int:
    """Rounds of messages that an agreement of so many ranks takes, one after the other."""
    return sum(1 for _ in schedule(size))


def _gather(rows: Tensor, group: Any) -> None:
    size, rank = group.size(), group.rank()
    for number, messages in enumerate(schedule(size)):
        works = []
        for place, (distance, count) in enumerate(messages):
            tag = number * RADIX + place
            works.append(group.recv([rows[distance : distance + count]], (rank + distance) % size, tag))
            works.append(group.send([rows[:count]], (rank - distance) % size, tag))
        AllOf(works, DEFAULT.limit).wait()


def _unite(mask: Tensor, group: Any) -> None:
    size, rank, distance = group.size(), group.rank(), 1
    other = torch.empty_like(mask)
    while distance < size:
        receiving = group.recv([other], (rank + distance) % size, distance)
        sending = group.send([mask], (rank - distance) % size, distance)
        AllOf((receiving, sending), DEFAULT.limit).wait()
        mask |= other
        distance *= 2


_GATHER = Operation("gather_words", _gather)
_UNITE = Operation("unite", _unite)


def gather_words(words: Tensor, group: Any = None) -> Tensor:
    """[ranks, words]: the int64 `words` of every rank, in the order of the ranks; all ranks of the group call it."""
    real: Any = td.group.WORLD if group is None else group
    size, rank = real.size(), real.rank()
    if size == 1:
        return words.view(1, -1)
    rows = words.new_empty(size, words.numel())
    rows[0] = words
    _run(_GATHER, (rows, real), words, group, False, (False, "gather_words", None))
    return rows.roll(rank, 0)


def unite(mask: Tensor, group: Any = None) -> Tensor:
    """The union over the ranks of a group of what each marked in its uint8 `mask`, which becomes that."""
    real: Any = td.group.WORLD if group is None else group
    if real.size() > 1:
        _run(_UNITE, (mask, real), mask, group, False, (False, "unite", None))
    return mask
