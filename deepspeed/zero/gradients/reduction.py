"""How one bucket of gradients gets to its owners: `Reduction`, and the plain one over the ranks of an axis.

Codecs are other objects with the same methods, which `deepspeed.zero.build.make_reduction` chooses.

[Note: late means] Where a step has several backwards, equal shards of several ranks are averaged once, before the step.
What a backward leaves is the mean over the shard's own ranks, so that the mean over copies is the mean of all. Taken
twice, because more gradients were added in between, it still is: the mean of equal values is the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.groups import played_backend
from deepspeed.comm.pending import AllOf
from deepspeed.parallel import AxisGroup

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

# So many owners get an operation of their own each; more share an all-reduce, which moves twice the bytes in one.
_FEW_OWNERS = 8


@dataclass(frozen=True, slots=True)
class SharePart:
    """The elements of one parameter in a slice."""

    name: str
    start: int
    """Where they begin in the slice."""
    length: int


@dataclass(frozen=True, slots=True)
class EvenShares:
    """Every rank owns as many elements, in the order of the ranks."""

    length: int
    parts: tuple[tuple[SharePart, ...], ...] = ()
    """What lies in each slice; one entry where all slices are alike."""


@dataclass(frozen=True, slots=True)
class OwnedShares:
    """(rank, elements) of those that own any, in the order in which their slices lie."""

    lengths: tuple[tuple[int, int], ...]
    parts: tuple[tuple[SharePart, ...], ...] = ()
    """What lies in each of them."""


@dataclass(frozen=True, slots=True)
class WholeShares:
    """Each rank receives all of it: it owns all, or too many ranks own parts and each takes its own."""


Share = EvenShares | OwnedShares | WholeShares


@dataclass(frozen=True, slots=True)
class ReductionWeights:
    """What gradients are multiplied by before and after they are summed over ranks."""

    before: float = 1.0
    after: float = 1.0
    mean: bool = True
    """The mean comes out, not the sum."""

    @classmethod
    def of(cls, schema: Schema, size: int, copies: int = 1) -> ReductionWeights:
        """Those of a config: the mean, or the sum if `gradient_allreduce_op` says so; divided early or late.

        Times `copies`, over which a mean is taken afterwards.
        """
        mean = schema.gradient_allreduce_op == "mean"
        whole = copies / size if mean else float(copies)
        if schema.prescale_gradients:
            return cls(whole, 1.0, mean)
        early = schema.gradient_predivide_factor
        return cls(1.0 / early, early * whole, mean)


LocalGradients = dict[tuple[str, int], Tensor]
"""What all or one of its owners have of a parameter, `[owners, elements]` by its name and the first of them."""


class Reduction:
    """Sums flat tensors over ranks; each rank receives the slice that it owns."""

    axis: AxisGroup
    """The ranks among which the slices are dealt."""
    late: AxisGroup | None = None
    """Ranks that hold the same slices, over which these are averaged once before the step; None if none are."""
    local: LocalGradients
    """Whole gradients that stay on this rank until the step, for all owners; empty where gradients travel."""

    @property
    def size(self) -> int:
        """Ranks among which the slices are dealt."""
        return self.axis.size

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.axis.rank

    @property
    def few(self) -> int:
        """So many owners of unequal slices it serves apart; where there are more, `WholeShares` is better."""
        return self.size

    def start(self, send: Tensor, share: Share) -> Pending[Tensor]:
        """Begin with a tensor that is used up; the result is this rank's slice, weighted."""
        raise TypeError(f"{type(self).__name__} defines no way for gradients")

    def stepped(self) -> None:
        """All ranks are about to take an optimizer step."""

    def state_dict(self) -> dict[str, Tensor]:
        """What it has to remember from step to step on this rank, for checkpoints; empty if nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave on the same rank of as many; nothing, if there is nothing of that kind."""

    def close(self) -> None:
        """Let go of whatever it holds."""


@dataclass(eq=False)
class ReduceToOwners(Reduction):
    """Reduce-scatter over the ranks of an axis; then a second hop, the sum over equal copies, where there are some."""

    axis: AxisGroup
    group: Any
    """The process group of the axis on which gradients travel."""
    weights: ReductionWeights = ReductionWeights()
    replicate: AxisGroup | None = None
    """Ranks that hold the same slice for other samples."""
    late: AxisGroup | None = None
    """The same, where their mean is taken once before the step: see [Note: late means]."""
    everywhere: bool = False
    """By all-reduce instead of to the owners only (`reduce_scatter` false)."""
    merged: bool = True
    """Slices of many owners share one all-reduce (`use_multi_rank_bucket_allreduce`)."""
    local: LocalGradients = field(default_factory=dict)

    @cached_property
    def _by_exchange(self) -> bool:
        return played_backend(self.group) == dist.Backend.GLOO

    @property
    def few(self) -> int:
        return _FEW_OWNERS if self.size > 1 and self.merged and not self._by_exchange else self.size

    def start(self, send: Tensor, share: Share) -> Pending[Tensor]:
        if self.weights.before != 1.0:
            send = send.mul_(self.weights.before)
        first = self._scatter(send, share) if self.size > 1 else Pending(self._mine(send, share))
        copies = self.replicate if self.replicate is not None and self.replicate.size > 1 else None
        if copies is None:
            return Pending(send, first, lambda _: self._weigh(first.wait()))
        if self.size == 1:
            mine = first.wait()
            return Pending(mine, comm.all_reduce(mine, group=copies.group, async_op=True), self._weigh)

        def second(_: Tensor) -> Tensor:
            mine = first.wait()
            comm.all_reduce(mine, group=copies.group)
            return self._weigh(mine)

        return Pending(send, first, second)

    def _weigh(self, mine: Tensor) -> Tensor:
        return mine.mul_(self.weights.after) if self.weights.after != 1.0 and mine.numel() else mine

    def _mine(self, send: Tensor, share: Share) -> Tensor:
        if isinstance(share, WholeShares):
            return send
        if isinstance(share, EvenShares):
            return send.narrow(0, self.rank * share.length, share.length)
        at = 0
        for owner, length in share.lengths:
            if owner == self.rank:
                return send.narrow(0, at, length)
            at += length
        return send[:0]

    def _scatter(self, send: Tensor, share: Share) -> Pending[Tensor]:
        if self.everywhere or isinstance(share, WholeShares):
            return self._all_reduce(send, share)
        if self._by_exchange and send.device.type == "cpu":
            return self._exchange(send, share)
        if isinstance(share, EvenShares):
            out = send.new_empty(share.length)
            return Pending(out, comm.reduce_scatter_tensor(out, send, group=self.group, async_op=True))
        works, at = [], 0
        for owner, length in share.lengths:
            root = self.axis.ranks[owner]
            works.append(comm.reduce(send.narrow(0, at, length), root, group=self.group, async_op=True))
            at += length
        return Pending(self._mine(send, share), AllOf([work for work in works if work is not None]))

    def _all_reduce(self, send: Tensor, share: Share) -> Pending[Tensor]:
        return Pending(self._mine(send, share), comm.all_reduce(send, group=self.group, async_op=True))

    def _exchange(self, send: Tensor, share: EvenShares | OwnedShares) -> Pending[Tensor]:
        """Send every slice to its owner, which adds them up in the order of the ranks.

        gloo's reduce-scatter moves twice the data and took four times as long. This rank's own slice stays where it is
        if it lies at an end, so that it needs no memory to travel to itself.
        """
        lengths = [share.length] * self.size if isinstance(share, EvenShares) else dense_lengths(share, self.size)
        mine = self._mine(send, share)
        others = list(lengths)
        sent, own = send, 0
        start, stop = sum(lengths[: self.rank]), sum(lengths[: self.rank + 1])
        if start == 0 or stop == send.numel():
            sent = send[stop:] if start == 0 else send[:start]
            others[self.rank] = 0
        else:
            own = len(mine)
        comes = [len(mine)] * self.size
        comes[self.rank] = own
        received = send.new_empty(sum(comes))
        work = comm.all_to_all_single(received, sent, comes, others, group=self.group, async_op=True)
        rank = self.rank

        def add(_: Tensor) -> Tensor:
            rows = received.view(-1, len(mine)).unbind(0) if len(mine) else ()
            _in_order(rows[:rank], mine, rows[rank + bool(own) :])
            received.untyped_storage().resize_(0)  # now, not when a thread of the backend forgets it
            return mine

        return Pending(mine, work, add)


def dense_lengths(share: OwnedShares, size: int) -> list[int]:
    """The elements that each rank owns."""
    lengths = [0] * size
    for owner, length in share.lengths:
        lengths[owner] = length
    return lengths


def _in_order(before: Sequence[Tensor], mine: Tensor, behind: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' slices in their order, into `mine`; the others' are used up."""
    if before:
        for row in before[1:]:
            before[0].add_(row)
        torch.add(before[0], mine, out=mine)
    for row in behind:
        mine.add_(row)
    return mine
