"""Gradient reduction over data-parallel ranks where nothing is sharded: bucketed, overlapped with backward.

[Note: absent gradients] A rank whose parameter got no gradient contributes zeros, since other ranks may have one.
Each bucket carries one number per parameter, 1 from a rank that has a gradient and 0 from one that has none; where
their sum is zero the gradient stays None, as in a single process, and the optimizer leaves the parameter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.ops.multi_tensor import scale_
from deepspeed.runtime.reduction import buckets
from deepspeed.runtime.reduction.pack import Pack
from deepspeed.runtime.reduction.sparse import reduce_rows, reduce_sparse
from deepspeed.zero.gradients.arrivals import Arrivals
from deepspeed.zero.gradients.reduction import Weights

__all__ = ["GradientReducer", "Over", "Slot"]


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter and the tensor whose `.grad` collects its gradients.

    Usually that is the parameter itself. Where gradients are accumulated in another dtype it is the master weight,
    and what autograd leaves on the parameter is moved there at once.
    """

    name: str
    param: nn.Parameter
    holder: nn.Parameter
    travels: torch.dtype
    """The dtype of its gradient between ranks."""

    @property
    def banked(self) -> bool:
        """True if gradients move from the parameter to another holder."""
        return self.holder is not self.param

    @torch.no_grad()
    def bank(self) -> None:
        """Add the parameter's gradient to the holder's, and clear it."""
        grad, self.param.grad = self.param.grad, None
        if grad is None:
            return
        if self.holder.grad is None:
            self.holder.grad = grad.to(self.holder.dtype)
        else:
            self.holder.grad.add_(grad)


@dataclass(frozen=True)
class Over:
    """The ranks over which gradients are summed, and what they are multiplied by."""

    group: Any
    size: int
    weights: Weights
    group_of: Callable[[nn.Parameter], Any] | None = None
    """The group of each parameter where they differ; it tells None for one that only this rank holds."""


class _Bucket:
    """Gradients that travel together, and where they are on their way."""

    def __init__(self, packed: list[Slot], alone: list[Slot]) -> None:
        self.members = packed + alone
        self.packed = len(packed)
        """So many of the members are packed; the rest travel alone."""
        self.holders = [slot.holder for slot in self.members]
        self.travels = self.members[0].travels
        self.everyone = torch.ones(len(self.members), dtype=self.holders[0].dtype, device=self.holders[0].device)
        self.pack = Pack([*self.holders[: self.packed], self.everyone], again=not self.narrowed)
        first, last = self.members[-1].name, self.members[0].name
        self.label = f"gradients of {first}" + (f" … {last}" if first != last else "")
        self.complete = True
        """This rank has a gradient for every member."""
        self.sent: list[Tensor] = []
        """The packed gradients as one tensor, then each that travels alone."""
        self.works: list[Any] = []
        self.present = self.everyone
        """The numbers of [Note: absent gradients], once gradients are handed back."""

    @property
    def narrowed(self) -> bool:
        """True if gradients travel in another dtype than they have."""
        return self.travels != self.everyone.dtype

    def hand_back(self) -> None:
        """Make what was sent the gradients."""
        flat, *alone = (tensor.to(self.everyone.dtype) for tensor in self.sent)
        *packed, self.present = self.pack.views(flat)
        for holder, grad in zip(self.holders, (*packed, *alone), strict=True):
            holder.grad = grad


class GradientReducer:
    """Sums or averages gradients over one process group; with one rank it only banks what has to be banked."""

    def __init__(
        self,
        slots: Sequence[Slot],
        over: Over,
        sparse: frozenset[int] = frozenset(),
        rows: frozenset[int] = frozenset(),
        holder_of: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """`holder_of` tells where a parameter's gradient is collected now, for parameters that were unfrozen."""
        self._holder_of = holder_of
        self._group_of = over.group_of or (lambda _: over.group)
        self._slots = list(slots)
        self._trained: list[Slot] = []
        self._group, self._size, self._weights = over.group, over.size, over.weights
        self._alone = over.size == 1 and all(self._group_of(slot.param) is None for slot in slots)
        self._sparse_ids = sparse
        self._row_ids = rows
        self.arrivals = Arrivals(self._launch, whole=True)
        """When gradients come and leave."""
        self._buckets: list[_Bucket] = []
        self._sparse: list[Slot] = []
        self._flags: tuple[bool, ...] = ()
        self._banks = any(slot.banked for slot in slots)
        self._reduced = False
        self._flying: list[_Bucket] = []
        """Those on their way as copies in another dtype, in the order in which they left."""
        self._kept: frozenset[int] = frozenset()
        self.refresh()

    @property
    def slots(self) -> list[Slot]:
        """Every parameter with the holder of its gradient, in the order of the model."""
        return self._slots

    def add(self, slots: Sequence[Slot]) -> None:
        """Reduce more parameters; takes effect with the next `refresh`."""
        self._slots += slots
        self._banks = any(slot.banked for slot in self._slots)

    def refresh(self) -> None:
        """Look again at which parameters are trained; one frozen after its gradient came counts until the step."""
        if self._alone and not self._banks:
            return
        flags = tuple([slot.param.requires_grad for slot in self._slots])  # a list is faster than a generator
        if flags != self._flags and (self._reduced or self.arrivals.dirty):
            flags = tuple(now or before for now, before in zip_longest(flags, self._flags, fillvalue=False))
        if flags == self._flags:
            return
        self._flags = flags
        if self._banks and self._holder_of is not None:  # one that was unfrozen has got its master meanwhile
            self._slots = [replace(slot, holder=self._holder_of(slot.param)) for slot in self._slots]
        self._trained = trained = list(compress(self._slots, flags))
        special = self._sparse_ids | self._row_ids
        special = frozenset(
            id(slot.param)
            for slot in trained
            if id(slot.param) in special and self._group_of(slot.param) is self._group
        )
        self._sparse = [slot for slot in trained if id(slot.param) in special]
        dense = [slot for slot in trained if id(slot.param) not in special]
        plans = buckets.plan(
            [slot.holder.numel() * slot.holder.element_size() for slot in dense],
            [
                (slot.holder.dtype, slot.holder.device, slot.travels, self._group_of(slot.param), self._is_kept(slot))
                for slot in dense
            ],
            buckets.BUCKET_BYTES,
        )
        plans.sort(key=lambda plan: self._is_kept(dense[plan.members[0]]))
        kept = sum(self._is_kept(dense[plan.members[0]]) for plan in plans)
        self._buckets = [_Bucket([dense[i] for i in plan.packed], [dense[i] for i in plan.alone]) for plan in plans]
        numbers = {id(slot): number for number, slot in enumerate(dense)}
        members = [[numbers[id(slot)] for slot in bucket.members] for bucket in self._buckets]
        sizes = [slot.holder.numel() for slot in dense]
        self.arrivals.close()
        self.arrivals.relearn()
        if self._alone:
            members, kept = [], 0
        self.arrivals.watch(members, sizes, sum(sizes), kept=kept)
        for slot in trained:
            if slot.param.requires_grad and (not self._alone or slot.banked):
                number = numbers.get(id(slot)) if not (self._alone or self._is_kept(slot)) else None
                self.arrivals.hook(slot.name, slot.param, number, slot.bank if slot.banked else None)

    def keep_back(self, params: Iterable[nn.Parameter]) -> None:
        """Let the gradients of these leave last of all, after the last pass."""
        self._kept, self._flags = frozenset(map(id, params)), ()
        self.refresh()

    def _is_kept(self, slot: Slot) -> bool:
        return id(slot.param) in self._kept

    eager = False
    """Gradients are reduced once per optimizer step, not in every backward."""

    def change_unreduced(self, param: nn.Parameter, change: Callable[[Tensor | None], Tensor]) -> None:
        """Put what `change` makes of it in place of this rank's whole gradient, before it is reduced."""
        holder = next((slot.holder for slot in self._slots if slot.param is param), param)
        holder.grad = change(holder.grad)
        self.arrivals.dirty = True

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply every gradient that is held."""
        scale_([slot.holder.grad for slot in self._slots if slot.holder.grad is not None], factor)

    def announce(self, begun: Callable[[], None], arrived: Callable[[], None]) -> None:
        """Call `arrived` when gradients arrive in a backward that the engine did not begin."""
        self.arrivals.notice = arrived

    def enter_backward(self) -> None:
        """A backward begins."""
        self.arrivals.inside = True

    def leave_backward(self) -> None:
        """A backward is over."""
        self.arrivals.inside = False

    def reopen(self) -> None:
        """More gradients are about to be added to what may have been reduced already.

        The mean of equal gradients is the gradient, so reducing a mean again does no harm; a sum must be undone.
        """
        if self._reduced:
            with torch.no_grad():
                self._undo_sums()
        self._reduced = False

    def _undo_sums(self) -> None:
        for slot in self._trained:
            if slot.holder.grad is not None and (again := self._again(slot)) != 1.0:
                slot.holder.grad.div_(again)

    def _again(self, slot: Slot) -> float:
        """What a gradient that all ranks of its group have alike is multiplied by when it is reduced."""
        group = self._group_of(slot.param)
        ranks = self._size if group is self._group else 1 if group is None else comm.get_world_size(group)
        return ranks / self._size if self._weights.mean else ranks

    def arm(self) -> None:
        """The backward that starts now is the last one before the optimizer: reduce while it runs."""
        if not self._alone:
            self.arrivals.arm()

    def begin(self) -> None:
        """Called from inside the outermost backward, before any gradient arrives."""
        self.arrivals.begin()

    def finish(self) -> None:
        """Launch what has not been launched and wait for all of it; gradients are then equal on all ranks."""
        if self._alone or (self._reduced and not self.arrivals.dirty and not self.arrivals.armed):
            return
        self.arrivals.settle()
        for bucket in self._buckets:
            if bucket.sent:
                self._land(bucket)
        self._flying.clear()
        self._reduce_sparse()
        self._reduced = True

    @property
    def empty(self) -> bool:
        """True if no rank has had any gradient; known once `finish` was called."""
        return all(slot.holder.grad is None and slot.param.grad is None for slot in self._slots)

    def settle(self) -> None:
        """The backward is over: gradients are reduced."""
        self.finish()

    def conclude(self) -> None:
        """The optimizer is about to step."""
        self.finish()

    def forget(self) -> None:
        """The gradients were used or dropped; whatever arrives next is new."""
        self.arrivals.forget()
        self.arrivals.inside = False
        self._reduced = False
        self._flying.clear()

    def close(self) -> None:
        """Remove every hook."""
        self.arrivals.close()
        self._buckets.clear()

    @torch.no_grad()
    def _launch(self, place: int) -> None:
        """Pack and start one bucket; runs inside backward or after it."""
        self._land_what_came()
        bucket = self._buckets[place]
        before = self._weights.before
        had = [holder.grad is not None for holder in bucket.holders]
        bucket.complete = all(had)
        # A copy of ones that are there already does not wait for the device, as new numbers from the host would.
        present = bucket.everyone.clone() if bucket.complete else bucket.everyone.new_tensor(had)
        grads = [_dense(holder) for holder in bucket.holders]
        flat = bucket.pack.fill([*grads[: bucket.packed], present])
        bucket.sent = [flat.to(bucket.travels), *(g.to(bucket.travels).contiguous() for g in grads[bucket.packed :])]
        if before != 1.0:
            for tensor in bucket.sent:
                tensor.mul_(before)
        group = self._group_of(bucket.members[0].param)
        if group is not None:
            with comm.labelled(bucket.label):
                bucket.works = [comm.all_reduce(tensor, group=group, async_op=True) for tensor in bucket.sent]
        if not bucket.narrowed:
            bucket.hand_back()  # the rest of backward uses the memory of what was packed
            return
        for holder in bucket.holders:
            holder.grad = None
        self._flying.append(bucket)

    def _land_what_came(self) -> None:
        """Let go of copies whose sums are there.

        It never waits: a rank that is ahead must not, inside of backward, since the others may need it to go on. For
        the numbers of [Note: absent gradients] the host would wait.
        """
        while self._flying and all(work.is_completed() for work in self._flying[0].works):
            bucket = self._flying.pop(0)
            if bucket.complete:
                self._land(bucket)

    @torch.no_grad()
    def _land(self, bucket: _Bucket) -> None:
        """Wait for one bucket and hand its gradients back."""
        after = self._weights.after
        for work in bucket.works:
            work.wait()
        if after != 1.0:
            for tensor in bucket.sent:
                tensor.mul_(after)
        if bucket.narrowed:
            bucket.hand_back()
        if not bucket.complete:
            for holder, number in zip(bucket.holders, bucket.present.tolist(), strict=True):
                if number == 0:
                    holder.grad = None
        bucket.works, bucket.sent, bucket.present = [], [], bucket.everyone

    def _reduce_sparse(self) -> None:
        before, after = self._weights.before, self._weights.after
        for slot in self._sparse:
            reduce = reduce_rows if id(slot.param) in self._row_ids else reduce_sparse
            with comm.labelled(f"gradient of {slot.name}"):
                slot.holder.grad = reduce(slot.holder, self._group, self._size, before * after)


def _dense(holder: nn.Parameter) -> Tensor:
    """The holder's gradient; zeros where it has none, dense where a module made it sparse unexpectedly."""
    grad = holder.grad
    if grad is None:
        return torch.zeros_like(holder)
    return grad if grad.layout == torch.strided else grad.to_dense()
