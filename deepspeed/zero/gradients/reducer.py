"""Gradients to their owners: arrival → bucket → reduction → the pieces of this rank. One reducer for stages 1 to 3.

Stage 1 lets whole gradients add up on the parameters and reduces in the last backward before the optimizer; stages 2
and 3 reduce in every backward and add up shards. Everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.owners import reduce_to_owners
from deepspeed.ops.multi_tensor import scale_
from deepspeed.zero.gradients.arrivals import Arrivals
from deepspeed.zero.gradients.bucket import Bucket
from deepspeed.zero.states.group import ShardGroup

__all__ = ["Manner", "ShardReducer"]


@dataclass(frozen=True)
class Manner:
    """How gradients are reduced."""

    eager: bool
    """In every backward, so that whole gradients do not outlive it."""
    limit: int
    """Elements per bucket."""
    before: float
    """What gradients are multiplied by before the sum over ranks,"""
    after: float
    """and after it."""
    overlap: bool = True
    """Let backward go on while gradients travel."""
    deferred: bool = False
    """Send nothing before backward is over."""
    everywhere: bool = False
    """By all-reduce instead of to the owners only."""
    merged: bool = True
    """Slices of several ranks share one operation where the backend cannot scatter them."""


class ShardReducer:
    """Reduces the gradients of some groups; the groups may change between steps."""

    def __init__(
        self,
        groups: Callable[[], Sequence[ShardGroup]],
        manner: Manner,
        *,
        enter: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        """`enter` and `leave` are called when a backward begins and ends."""
        self._groups = groups
        self._enter, self._leave = enter, leave
        self._manner = manner
        self._arrivals = Arrivals(self._launch, early=not manner.deferred)
        self._buckets: list[Bucket] = []
        self._flags: tuple[bool, ...] = ()
        self._had: set[int] = set()
        self.refresh()

    @property
    def eager(self) -> bool:
        """True if gradients are reduced in every backward."""
        return self._manner.eager

    def refresh(self) -> None:
        """Look again at which parameters are trained."""
        groups = self._groups()
        flags = tuple(param.requires_grad for group in groups for param in group.params)
        if flags == self._flags:
            return
        self._flags = flags
        self._buckets = [bucket for group in reversed(groups) for bucket in group.buckets(self._manner.limit)]
        first = {id(param): group.on_arrival(param) for group in groups for param in group.params}
        self._arrivals.watch([[p for p in bucket.params if p.requires_grad] for bucket in self._buckets])
        for place, bucket in enumerate(self._buckets):
            for name, param in zip(bucket.names, bucket.params, strict=True):
                if param.requires_grad:
                    self._arrivals.hook(name, param, place, first[id(param)])

    def had_gradient(self, param: nn.Parameter) -> bool:
        """True if this rank sent a gradient of the parameter since the last `forget`."""
        return id(param) in self._had

    def note_gradient(self, param: nn.Parameter) -> None:
        """A gradient of the parameter was given by other means than a backward."""
        self._had.add(id(param))

    def enter_backward(self) -> None:
        """A backward begins."""
        if self._enter is not None:
            self._enter()

    def leave_backward(self) -> None:
        """A backward is over."""
        if self._leave is not None:
            self._leave()

    def reopen(self) -> None:
        """More gradients are about to come: what was reduced lies with its owners, new ones are added to it."""

    def arm(self) -> None:
        """The backward that starts now is to be reduced while it runs."""
        self._arrivals.arm()

    def begin(self) -> None:
        """Called from inside the outermost backward, before any gradient arrives."""
        self._arrivals.begin()

    def finish(self) -> None:
        """Launch what has not been launched and add all of it to the pieces."""
        if not (self._arrivals.armed or self._arrivals.dirty):
            return
        self._arrivals.settle()
        for bucket in self._buckets:
            self._land(bucket)

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply every gradient that is held, whole or in pieces."""
        held = [piece.gradient for group in self._groups() for piece in group.pieces]
        whole = [grad for group in self._groups() for grad in group.whole_gradients()]
        scale_([grad for grad in (*held, *whole) if grad is not None], factor)

    def forget(self) -> None:
        """The gradients were used or dropped; whatever arrives next is new."""
        self._arrivals.forget()
        self._had.clear()
        for bucket in self._buckets:
            bucket.pending = None
        for group in self._groups():
            for piece in group.pieces:
                piece.gradient = None

    def close(self) -> None:
        """Remove every hook."""
        self._arrivals.close()
        self._buckets.clear()

    @torch.no_grad()
    def _launch(self, place: int) -> None:
        bucket = self._buckets[place]
        grads = [take() for take in bucket.take]
        self._had.update(id(p) for p, grad in zip(bucket.params, grads, strict=True) if grad is not None)
        send = bucket.pack(grads)
        if self._manner.before != 1.0:
            send = send.mul_(self._manner.before)
        with comm.labelled(bucket.label):
            bucket.pending = reduce_to_owners(
                send, bucket.splits, bucket.group, everywhere=self._manner.everywhere, merged=self._manner.merged
            )
        if not self._manner.overlap:
            self._land(bucket)

    @torch.no_grad()
    def _land(self, bucket: Bucket) -> None:
        """Wait for one bucket and add what came to the pieces."""
        if bucket.pending is None:
            return
        mine, bucket.pending = bucket.pending.wait(), None
        if not bucket.cuts:
            return
        if self._manner.after != 1.0:
            mine.mul_(self._manner.after)
        mine = mine.to(bucket.accumulate)
        if mine.untyped_storage().nbytes() > mine.nbytes:
            mine = mine.clone()  # a slice of what was sent; the rest of it is not needed any more
        old, new = [], []
        for cut in bucket.cuts:
            part = mine[cut.start : cut.stop]
            if cut.piece.gradient is None:
                cut.piece.gradient = part
            else:
                old.append(cut.piece.gradient)
                new.append(part)
        if old:
            torch._foreach_add_(old, new)
