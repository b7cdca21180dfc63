"""`RankAgreement`: small agreements between the ranks of an axis, before one of them waits for what never comes."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.agreement import (
    LAST,
    Collector,
    EarlyReceives,
    begin_to_gather_words,
    gather_words,
    receive_early,
    unite,
)
from deepspeed.errors import CommError, FileError
from deepspeed.parallel import AxisGroup

T = TypeVar("T")

DONE = 0
"""This rank's pass is over; it serves the others until theirs are."""
STEP = -1
"""This rank takes an optimizer step, or needs its gradients."""


def begin_code(key: object, *, backward: bool) -> int:
    """The code of a rank that begins a pass: equal for equal keys, even for forward and odd for backward."""
    return -2 - 2 * digest(key) - backward


def digest(value: object) -> int:
    """A number by which ranks compare values that are too large to send."""
    return zlib.crc32(repr(value).encode())


class RankAgreement:
    """Exchanges a few numbers per rank; the first is a code of those above, or a request: a positive number.

    Ranks that torch only pretends to have (its "fake" backend) say what this one says.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self.alone = axis.size == 1 or dist.get_backend(axis.group) == "fake"
        """Only this process answers."""
        self._flags: Any = None
        self._received: EarlyReceives | None = None
        self.exchanges = 0
        """How many there have been: each costs `deepspeed.comm.agreement.rounds` messages one after the other."""

    @property
    def _group(self) -> Any:
        """Made by the first exchange over this axis, in which all ranks are."""
        return self._axis.host_group

    def exchange(self, words: Sequence[int], what: str) -> Tensor:
        """[ranks, words]: what every rank says, in the order of the ranks."""
        return self._exchange(words, what, LAST)

    def exchange_at_end(self, words: Sequence[int], what: str) -> Tensor:
        """The same where the first rank comes last, as a rule: it need not wait if it listened."""
        received, self._received = self._received, None
        return self._exchange(words, what, Collector(0, early=True, received=received))

    def receive_early(self, count: int) -> None:
        """Soon there will be an exchange at the end, of so many words: the first rank gets ready."""
        if not self.alone and self._received is None:
            self._received = receive_early(count, self._group)

    def _exchange(self, words: Sequence[int], what: str, collector: Collector) -> Tensor:
        self.exchanges += 1
        mine = torch.tensor(words, dtype=torch.int64)
        if self.alone:
            return mine.view(1, -1)
        with comm.labelled(what):
            return gather_words(mine, self._group, collector=collector)

    def begin_exchange(self, words: Sequence[int], what: str) -> Pending[Tensor]:
        """As `exchange`, without waiting yet; until then these ranks exchange nothing else."""
        self.exchanges += 1
        mine = torch.tensor(words, dtype=torch.int64)
        if self.alone:
            return Pending(mine.view(1, -1))
        with comm.labelled(what):
            return begin_to_gather_words(mine, self._group)

    def prepare_flags(self) -> None:
        """Make a group for `begin_flags`; all ranks together."""
        if self._flags is None and not self.alone:
            self._flags = self._axis.twin("gloo")

    def begin_flags(self, flags: Sequence[bool]) -> Pending[Tensor]:
        """Begin to find out which flags are set on every rank: not 0 in the result; ranks ask in the same order."""
        mine = torch.tensor(flags, dtype=torch.uint8)
        if self.alone:
            return Pending(mine)
        with comm.labelled("gradients that are whole"):
            return Pending(mine, comm.all_reduce(mine, comm.ReduceOp.MIN, group=self._flags, async_op=True))

    def union(self, members: Iterable[int], count: int) -> set[int]:
        """All members that any rank has, of `count` possible ones."""
        found = set(members)
        if self.alone:
            return found
        mask = torch.zeros(count, dtype=torch.uint8)
        if found:
            mask[sorted(found)] = 1
        with comm.labelled("union of what ranks had"):
            return set(unite(mask, self._group).nonzero().view(-1).tolist())

    def broadcast_numbers(self, numbers: Sequence[int], count: int) -> list[int]:
        """The first rank's `count` numbers, on every rank."""
        if self.alone:
            return list(numbers)
        mine = self._axis.rank == 0
        sent = torch.tensor(numbers, dtype=torch.int64) if mine else torch.empty(count, dtype=torch.int64)
        with comm.labelled("order of gradients"):
            comm.broadcast(sent, src=self._axis.ranks[0], group=self._group)
        return [int(number) for number in sent.tolist()]

    def broadcast_bytes(self, source: int, data: bytes, size: int) -> bytes:
        """What one rank of the axis says, `size` bytes, on every rank."""
        if self.alone or size == 0:
            return data
        mine = self._axis.rank == source
        sent = torch.tensor(list(data), dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
        with comm.labelled("what a rank says"):
            comm.broadcast(sent, src=self._axis.ranks[source], group=self._group)
        return bytes(sent.tolist())

    def run_together(self, action: Callable[[], T], what: str, *, needed: bool = True) -> T:
        """Do what may fail on one rank alone, for want of space on its disk: then it fails on all of them."""
        if not needed:
            return action()
        error: FileError | None = None
        try:
            result = action()
        except FileError as caught:
            error = caught
        failed = self.exchange([int(error is not None)], what)[:, 0].nonzero().view(-1).tolist()
        if error is not None:
            raise error
        if failed:
            ranks = ", ".join(str(self._axis.ranks[place]) for place in failed[:8]) + _more(failed)
            raise FileError(errno.ENOSPC, f"{what} failed on rank {ranks}, whose own error says why", "")
        return result

    def disagreement(self, where: str) -> CommError:
        """The error of ranks that cannot go on together: each tells where it is."""
        said: list[Any] = [where] if self.alone else [None] * self._axis.size
        if not self.alone:
            comm.all_gather_object(said, where, group=self._group)
        lines = [f"rank {rank} {text}" for rank, text in zip(self._axis.ranks, said, strict=False)]
        return CommError(
            "ranks do different things, so that parameters and gradients cannot travel: "
            + "; ".join(_brief(lines))
            + ". Every rank must call forward, backward and step the same number of times."
        )


def _brief(lines: list[str]) -> list[str]:
    """Ranks that say what many others say are counted, not listed."""
    by_text: dict[str, list[str]] = {}
    for line in lines:
        _, rank, text = line.split(" ", 2)
        by_text.setdefault(text, []).append(rank)
    return [
        f"rank {ranks[0]} {text}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:8])}{_more(ranks)} {text}"
        for text, ranks in by_text.items()
    ]


def _more(ranks: Sequence[object]) -> str:
    return f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
