"""Whole gradients that every rank has: summed where they lie, on the parameter or on its master.

[Note: absent gradients] A rank whose parameter got no gradient contributes zeros, since other ranks may have one.
Each bucket carries one number per parameter, 1 from a rank that has a gradient and 0 from one that has none; where
their sum is zero the gradient stays None, as in a single process, and the optimizer leaves the parameter alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.errors import UsageError
from deepspeed.zero.gradients.bucket import label
from deepspeed.zero.gradients.interfaces import BucketEntry, ReductionOf
from deepspeed.zero.gradients.reduction import WholeShares
from deepspeed.zero.gradients.sparse import reduce_rows, reduce_sparse
from deepspeed.zero.placement import AxisOf, Placement

if TYPE_CHECKING:
    from deepspeed.zero.gradients.reduction import ReductionWeights
    from deepspeed.zero.piece import StatePiece

FIRST_BYTES = 1 << 20  # a small first bucket starts communicating early
BUCKET_BYTES = 25 << 20
ALONE_BYTES = 4 << 20  # from this size on a gradient is reduced where it lies; packing would cost a copy
SMALL_BYTES = 16 << 10
"""Gradients up to this size on average keep their tensor: memory that is held between steps has to be worth it."""

_OURS = 2  # references to a view of which only this module has one: the list's and that of the call which counts


@dataclass(frozen=True)
class ReplicatedPlacement:
    """Where the gradients of whole parameters are collected, and how they travel."""

    placement_of: AxisOf
    holder_of: Callable[[nn.Parameter], nn.Parameter]
    """The tensor whose `.grad` collects a parameter's gradients: itself, or a master in another dtype."""
    dtypes: Callable[[], Callable[[nn.Parameter], torch.dtype]]
    """Looks at the model, and tells in which dtype each gradient travels."""
    weights_of: Callable[[Placement], ReductionWeights]
    main: Placement
    """Of parameters that lie on all ranks."""
    sparse: frozenset[int] = frozenset()
    """Ids of parameters with sparse gradients."""
    rows: frozenset[int] = frozenset()
    """Ids of parameters with dense gradients of which only touched rows travel."""


class ReplicatedGradients:
    """`deepspeed.zero.gradients.interfaces.GradientGroup`: the gradients of whole parameters, in the model's order."""

    pieces: Sequence[StatePiece] = ()

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], holding: ReplicatedPlacement) -> None:
        self._holding = holding
        self._names: list[str] = []
        self.params: list[nn.Parameter] = []
        self._holders: list[nn.Parameter] = []
        self._travels: list[torch.dtype] = []
        self._place: dict[int, int] = {}
        self.alone = self.banks = False
        """No other rank has any of them; some are added up on masters."""
        self.add(named)

    def add(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Reduce more parameters, if these are not known."""
        dtype_of = self._holding.dtypes()
        for name, param in named:
            if id(param) not in self._place:
                self._place[id(param)] = len(self.params)
                self._names.append(name)
                self.params.append(param)
                self._holders.append(self._holding.holder_of(param))
                self._travels.append(dtype_of(param))
        placements = {self._holding.placement_of(param) for param in self.params} | {self._holding.main}
        self.alone = all(placement.copies == 1 for placement in placements)
        self.banks = any(map(self._is_banked, range(len(self.params))))

    def _is_banked(self, place: int) -> bool:
        """True if gradients move from the parameter to another holder."""
        return self._holders[place] is not self.params[place]

    def holder(self, param: nn.Parameter) -> nn.Parameter:
        """The tensor whose `.grad` is a parameter's gradient."""
        place = self._place.get(id(param))
        return param if place is None else self._holders[place]

    def entries(self, reduction_of: ReductionOf) -> list[BucketEntry]:
        """See `GradientGroup`; one that was unfrozen may have got a master meanwhile."""
        if self.banks:
            self._holders = [self._holding.holder_of(param) for param in self.params]
        return [self._entry(place, reduction_of) for place in range(len(self.params))]

    def _entry(self, place: int, reduction_of: ReductionOf) -> BucketEntry:
        holding, param, holder = self._holding, self.params[place], self._holders[place]
        placement = holding.placement_of(param)
        mean = holding.weights_of(placement).mean
        by_rows = placement is holding.main and id(param) in holding.sparse | holding.rows
        return BucketEntry(
            name=self._names[place],
            param=param,
            numel=holder.numel(),
            reduction=reduction_of(placement, param),
            dtype=self._travels[place],
            accumulate=holder.dtype,
            device=holder.device,
            holder=holder,
            by_rows=partial(self._reduce_rows, place) if by_rows else None,
            again=placement.copies / placement.size if mean else float(placement.copies),
        )

    def _reduce_rows(self, place: int) -> None:
        holding, param, holder = self._holding, self.params[place], self._holders[place]
        axis, weights = holding.main.replicate, holding.weights_of(holding.main)
        assert axis is not None, "copies of whole parameters lie on an axis"
        reduce = reduce_rows if id(param) in holding.rows else reduce_sparse
        with comm.labelled(f"gradient of {self._names[place]}"):
            holder.grad = reduce(holder, axis.group, axis.size, weights.before * weights.after)

    def whole_gradients(self) -> Iterator[Tensor]:
        for holder in self._holders:
            if holder.grad is not None:
                yield holder.grad

    @property
    def empty(self) -> bool:
        return next(self.whole_gradients(), None) is None and all(param.grad is None for param in self.params)

    def on_arrival(self, param: nn.Parameter) -> Callable[[], None] | None:
        place = self._place[id(param)]
        return partial(_bank, param, self._holders[place]) if self._is_banked(place) else None


@torch.no_grad()
def _bank(param: nn.Parameter, holder: nn.Parameter) -> None:
    """Add the parameter's gradient to the holder's, and clear it."""
    grad, param.grad = param.grad, None
    if grad is None:
        return
    if holder.grad is None:
        holder.grad = grad.to(holder.dtype)
    else:
        holder.grad.add_(grad)


class ReplicatedBucket:
    """Gradients that travel together, and where they are on their way."""

    def __init__(self, entries: Sequence[BucketEntry]) -> None:
        small = [entry for entry in entries if entry.numel * entry.accumulate.itemsize < ALONE_BYTES]
        self.entries = small + [entry for entry in entries if entry.numel * entry.accumulate.itemsize >= ALONE_BYTES]
        self._packed = len(small)
        """So many are packed; the rest travel alone."""
        self._holders = [entry.param if entry.holder is None else entry.holder for entry in self.entries]
        first = self.entries[0]
        self.device, self._reduction, self._travels = first.device, first.reduction, first.dtype
        self._everyone = torch.ones(len(self.entries), dtype=first.accumulate, device=first.device)
        self._narrowed = self._travels != first.accumulate
        self._pack = PackedGradients([*self._holders[: self._packed], self._everyone], again=not self._narrowed)
        self._label = label(self.entries)
        self.had = [True] * len(self.entries)
        """For which entries this rank has a gradient."""
        self._pending: list[Pending[Tensor]] = []
        """The packed gradients as one tensor, then each that travels alone."""
        self._present = self._everyone
        """The numbers of [Note: absent gradients], once gradients are handed back."""

    @property
    def arrived(self) -> bool:
        """True if all of it is summed."""
        return all(pending.is_completed() for pending in self._pending)

    @torch.no_grad()
    def send(self) -> None:
        """Pack the gradients and begin to sum them; runs inside backward or after it."""
        found = [holder.grad for holder in self._holders]
        self.had = [grad is not None for grad in found]
        # A copy of ones that are there already does not wait for the device, as new numbers from the host would.
        present = self._everyone.clone() if all(self.had) else self._everyone.new_tensor(self.had)
        grads = [
            grad if grad is not None and grad.layout == torch.strided else _dense(grad, holder)
            for grad, holder in zip(found, self._holders, strict=True)
        ]
        flat = self._pack.fill([*grads[: self._packed], present])
        sent = [flat.to(self._travels), *(grad.to(self._travels).contiguous() for grad in grads[self._packed :])]
        with comm.labelled(self._label):
            self._pending = [self._reduction.start(tensor, WholeShares()) for tensor in sent]
        if not self._narrowed:
            self._hand_back(sent)  # the rest of backward uses the memory of what was packed
            return
        for holder in self._holders:
            holder.grad = None

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for it and hand its gradients back."""
        sums = [pending.wait() for pending in self._pending]
        if self._narrowed:
            self._hand_back(sums)
        if not all(self.had):
            for holder, mine, number in zip(self._holders, self.had, self._present.tolist(), strict=True):
                if number == 0 and not mine:  # of what this rank has, a plan cannot read the number
                    holder.grad = None
        self._pending, self._present = [], self._everyone

    def _hand_back(self, sums: Sequence[Tensor]) -> None:
        """Make what was sent the gradients."""
        flat, *alone = (tensor.to(self._everyone.dtype) for tensor in sums)
        *packed, self._present = self._pack.views(flat)
        try:
            for holder, grad in zip(self._holders, (*packed, *alone), strict=True):
                holder.grad = grad
        except RuntimeError as error:
            self._require_dtypes(error)
            raise

    def _require_dtypes(self, error: RuntimeError) -> None:
        for entry, holder in zip(self.entries, self._holders, strict=True):
            if holder.dtype != entry.accumulate:
                raise UsageError(
                    f"{entry.name} is {holder.dtype} by now, but the engine trains it as {entry.accumulate}: the "
                    "module was converted after deepspeed.initialize. Convert it back before the next forward, or "
                    "choose the dtype by bf16 or fp16 in the config."
                ) from error


class ReplicatedInFlight:
    """Buckets on their way, any number of them."""

    def __init__(self) -> None:
        self._buckets: list[ReplicatedBucket] = []
        self._in_flight: list[ReplicatedBucket] = []

    def carry(self, buckets: Sequence[Sequence[BucketEntry]]) -> None:
        """These leave from now on."""
        self._buckets = [ReplicatedBucket(entries) for entries in buckets]

    def send(self, place: int, ask: object = None) -> list[int]:
        """A bucket leaves; its numbers tell who had a gradient, so nothing is returned."""
        self._finish_completed()
        bucket = self._buckets[place]
        bucket.send()
        self._in_flight.append(bucket)
        return []

    def _finish_completed(self) -> None:
        """Let go of copies whose sums are there.

        It never waits: a rank that is ahead must not, inside of backward, since the others may need it to go on. For
        the numbers of [Note: absent gradients] the host would wait.
        """
        for bucket in list(self._in_flight):
            if not bucket.arrived:
                return
            if all(bucket.had):
                bucket.wait()
                self._in_flight.remove(bucket)

    def wait(self) -> None:
        """All that was sent is summed."""
        flying, self._in_flight = self._in_flight, []
        for bucket in flying:
            bucket.wait()

    def drop(self) -> None:
        """After a backward that failed: the others may never come for the rest of it."""
        self._in_flight = []


class PackedGradients:
    """One tensor for gradients that are shaped `like` these, which are views of it afterwards.

    A view takes longer to make than a small gradient takes to copy, so a pack of small ones keeps its tensor and its
    views from step to step, as long as nothing else has kept one of them. `again`: it may be used in the next step.
    """

    def __init__(self, like: Sequence[Tensor], *, again: bool) -> None:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in like)
        self._like = like
        self._keeps = again and nbytes <= SMALL_BYTES * len(like)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._users = (0, 0)

    def fill(self, grads: Sequence[Tensor]) -> Tensor:
        flat: Tensor = _flatten_dense_tensors(grads)
        kept = self._flat
        return flat if kept is None or not self._is_ours(kept) else kept.copy_(flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in what `fill` made."""
        if flat is self._flat:
            return self._views
        views = list(_unflatten_dense_tensors(flat, self._like))
        if self._keeps:
            self._flat, self._views, self._users = flat, views, _users_of(flat)
        return views

    def _is_ours(self, flat: Tensor) -> bool:
        """Nothing else has kept a gradient of the last step, or another view of its memory."""
        return _users_of(flat) == self._users and {_OURS}.issuperset(map(sys.getrefcount, self._views))


def _users_of(tensor: Tensor) -> tuple[int, int]:
    """How many tensors share its memory, and how many names its storage has in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _dense(grad: Tensor | None, holder: nn.Parameter) -> Tensor:
    """Zeros where the holder has no gradient; dense where a module made it sparse unexpectedly."""
    return torch.zeros_like(holder) if grad is None else grad.to_dense()
