"""Gradients to their owners: arrival → the order all ranks share → bucket → reduction → the pieces of this rank.

Shards may be reduced in every backward and added up, or whole gradients add up on the parameters and are reduced in the
last backward before the optimizer. Where every rank has all of a parameter, its gradient is summed where it lies; what
ranks agree upon then travels with the buckets, and their hosts exchange nothing: [Note: absent gradients].
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepspeed.comm import Pending
from deepspeed.errors import UsageError
from deepspeed.ops.multi_tensor import scale_
from deepspeed.zero.agreement import STEP, RankAgreement, digest
from deepspeed.zero.gradients.bucket import Bucket, BucketsInFlight, LateMean, late_packs
from deepspeed.zero.gradients.bucket_order import pack_buckets
from deepspeed.zero.gradients.hooks import GradientHooks
from deepspeed.zero.gradients.interfaces import BucketEntry, GradientConsumer, GradientGroup, ReductionOf
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.gradients.replicated import ReplicatedGradients, ReplicatedInFlight
from deepspeed.zero.parameters.data import plain_access
from deepspeed.zero.parameters.shard import shard_of

if TYPE_CHECKING:
    from deepspeed.zero.parameters.coordinator import FetchCoordinator

_NEVER = 1 << 40  # later than any step
_WAITING = 2  # buckets that may wait for others to complete before they leave incomplete


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients of an engine leave."""

    every_backward: bool
    """Whole gradients do not outlive a backward."""
    limit: int
    """Elements per bucket; of gradients that are summed where they lie, bytes."""
    first: int | None = None
    """The limit of the first one."""
    overlap: bool = True
    """Let backward go on while gradients travel."""
    strict: bool = False
    """The user sized the buckets. On a host, where as much comes as goes, one is waited for at once."""
    early: bool = True
    """Send while backward runs."""


@dataclass(eq=False, slots=True)
class _Learned:
    """When gradients came in a kind of backward."""

    positions: list[int]
    """Where the pass was, by the number of the parameter."""
    version: int = -1
    """Of the buckets for which `places` holds."""
    places: list[int] = field(default_factory=list)
    """Where the pass is when each bucket leaves."""


class GradientReducer:
    """Reduces the gradients of some groups; the groups may change between steps."""

    def __init__(
        self,
        groups: Callable[[], Sequence[GradientGroup]],
        reduction_of: ReductionOf,
        ways: ReductionSettings,
        agreement: RankAgreement | None,
        *,
        registered: Callable[[], Iterable[nn.Parameter]],
        passes: FetchCoordinator | None = None,
        replicated: ReplicatedGradients | None = None,
    ) -> None:
        """`registered` are the parameters in the model's order; `passes` is notified when a backward begins and ends.

        Gradients that are summed where they lie, the only group then, need no `agreement`.
        """
        self._groups = groups
        self._reduction_of = reduction_of
        self._ways = ways
        self.eager = ways.every_backward
        """True if gradients are reduced in every backward."""
        self.replicated = replicated
        """The gradients that are summed where they lie; None: gradients are taken from the parameters."""
        self._agreement = agreement
        self._version = 0
        self._model, self._passes = registered, passes
        self.hooks = GradientHooks(self._launch, early=ways.early, whole=replicated is not None)
        """When gradients come and leave."""
        self._entries: list[BucketEntry] = []
        self._reductions: list[Reduction] = []
        """Those of the entries, each once."""
        self._by_rows: list[BucketEntry] = []
        """Those that travel in no bucket."""
        self._number: dict[int, int] = {}
        self._order: list[int] = []
        self._unused: frozenset[int] = frozenset()
        self._guessed = True
        self._proposals = self._patience = 0
        self.buckets: list[list[BucketEntry]] = []
        """Gradients that travel together, in the order of leaving; none where no other rank has any."""
        self._in_flight: BucketsInFlight | ReplicatedInFlight = (
            BucketsInFlight(self._reduced) if replicated is None else ReplicatedInFlight()
        )
        self._consumer: GradientConsumer | None = None
        self._flags: tuple[bool, ...] = ()
        self._had: set[int] = set()  # ids of parameters, which outlive their numbers
        self._absent: frozenset[int] | None = None
        self._launched = False
        self._kept: frozenset[int] = frozenset()
        self.refresh()

    # ---- what is trained

    def refresh(self) -> None:
        """Look again at which parameters are trained; one frozen after its gradient came counts until the step."""
        if self.replicated is not None and self.replicated.alone and not self.replicated.banks:
            return
        groups, buckets = self._groups(), self.hooks.buckets
        with plain_access():
            flags = tuple([param.requires_grad for group in groups for param in group.params])
        if flags == self._flags:
            return
        reduced = self.replicated is not None and self._absent is not None
        before = {id(entry.param) for entry in (*self._entries, *self._by_rows)}
        before = before if self._had or reduced or buckets.late or self.hooks.dirty else set()
        flags = tuple([param.requires_grad or id(param) in before for group in groups for param in group.params])
        if flags == self._flags:
            return
        self._flags = flags
        late = [id(self._entries[number].param) for number in buckets.late]
        everything = [(group, entry) for group in groups for entry in group.entries(self._reduction_of)]
        trained = [item for item in everything if item[1].param.requires_grad or id(item[1].param) in before]
        self._entries = [entry for _, entry in trained if entry.by_rows is None]
        self._by_rows = [entry for _, entry in trained if entry.by_rows is not None]
        self._reductions = list({id(entry.reduction): entry.reduction for entry in self._entries}.values())
        self._number = {id(entry.param): number for number, entry in enumerate(self._entries)}
        self._order, self._unused, self._guessed = self._registered(), frozenset(), True
        self.hooks.close()
        self.hooks.relearn()
        self._rebuild()
        self.hooks.buckets.late = {self._number[each] for each in late}
        for group, entry in trained:
            if entry.param.requires_grad:
                self._hook(group, entry)

    def _hook(self, group: GradientGroup, entry: BucketEntry) -> None:
        param, take = entry.param, group.on_arrival(entry.param)
        if self._alone and take is None:
            return
        first = take if self._consumer is None else partial(_arrived, self._consumer, param, take)
        followed = None if self._alone or id(param) in self._kept else self._number.get(id(param))
        self.hooks.hook(entry.name, param, followed, first)

    @property
    def _alone(self) -> bool:
        """True if gradients lie where they are needed: there is no other rank."""
        return self.replicated is not None and self.replicated.alone

    def use_up(self, consumer: GradientConsumer) -> None:
        """Hand gradients over as they are reduced, on all ranks together."""
        assert self._agreement is not None, "gradients that are summed in place are not used up"
        self._agreement.prepare_flags()
        self._consumer, self._flags = consumer, ()
        self.refresh()

    def keep_back(self, params: Iterable[nn.Parameter]) -> None:
        """Let the gradients of these leave last of all, after the last pass."""
        self._kept, self._flags = frozenset(map(id, params)), ()
        self.refresh()

    def _registered(self) -> list[int]:
        """The reverse of the model's order, over all groups at once; what is not in the model comes first."""
        places = {id(param): place for place, param in enumerate(self._model())}
        last = len(places)
        return sorted(
            range(len(self._entries)), key=lambda number: -places.get(id(self._entries[number].param), last + number)
        )

    def _rebuild(self) -> None:
        whole = self.replicated is not None
        if self._alone:
            self.hooks.watch([], [], 0)
            return
        sizes = [entry.numel * (entry.accumulate.itemsize if whole else 1) for entry in self._entries]
        kinds = [(entry.kind, id(entry.param) in self._kept) for entry in self._entries]
        packed = pack_buckets(self._order, sizes, kinds, self._ways.limit, unused=self._unused, first=self._ways.first)
        packed.sort(key=lambda numbers: kinds[numbers[0]][1])
        kept = sum(kinds[numbers[0]][1] for numbers in packed)
        self.buckets = [[self._entries[number] for number in numbers] for numbers in packed]
        self._in_flight.carry(self.buckets)
        self._version += 1
        largest = max((sum(sizes[number] for number in numbers) for numbers in packed), default=0)
        budget = sum(sizes) if whole else _WAITING * largest  # what is summed in place leaves when it is complete
        self.hooks.watch(packed, sizes, budget, kept=kept)

    # ---- what happened

    def had_gradient(self, param: nn.Parameter) -> bool:
        """True if this rank sent a gradient of the parameter since the last `forget`."""
        return id(param) in self._had

    def note_gradient(self, param: nn.Parameter) -> None:
        """A gradient of the parameter is given by other means than a backward."""
        if id(param) in self._number:
            entry = self._entries[self._number[id(param)]]
            if any(name == entry.name for name, _ in entry.reduction.local):
                raise UsageError(
                    f"the gradient of {entry.name} cannot be set in this step: the optimizer exchanges signs of "
                    "momenta, and gradients stay on the ranks that computed them. Change it in a hook of the "
                    "parameter (register_hook), or use zero_optimization.stage 0"
                )
            self._had.add(id(param))
            self._absent = None

    def absent(self) -> list[nn.Parameter]:
        """Trained parameters of which no rank has had a gradient; known once `conclude` was called."""
        return [self._entries[number].param for number in sorted(self._absent or ())]

    @property
    def empty(self) -> bool:
        """True if no rank has had any gradient; the same on all of them once `conclude` was called."""
        if self.replicated is not None:
            return self.replicated.empty
        return self._absent is not None and len(self._absent) == len(self._entries)

    # ---- a backward

    def announce(self, begun: Callable[[], None], arrived: Callable[[], None]) -> None:
        """In a backward that the engine did not begin, call `begun` before any gradient, else `arrived` after one."""
        self.hooks.notice = arrived
        if self._passes is not None:
            self._passes.notice = begun

    def enter_backward(self) -> None:
        self.hooks.inside = True
        if self._passes is not None:
            self._passes.begin_backward()

    def leave_backward(self) -> None:
        """A backward is over."""
        self.hooks.inside = False
        if self._passes is not None:
            self._passes.end_backward()

    def reopen(self) -> None:
        """More gradients are about to be added to what may have been reduced already.

        Shards that were reduced lie with their owners. Where gradients are summed in place, reducing a mean again does
        no harm, as the mean of equal gradients is the gradient; a sum must be undone.
        """
        if self.replicated is None or self._absent is None:
            return
        with torch.no_grad():
            for entry in (*self._entries, *self._by_rows):
                if entry.again != 1.0 and entry.holder is not None and entry.holder.grad is not None:
                    entry.holder.grad.div_(entry.again)
        self._absent = None

    def arm(self) -> None:
        """The backward that starts now is to be reduced while it runs."""
        if self._alone:
            return
        if self._guessed and self._passes is not None:
            self._take_guess(self._passes.first_uses())
        self.hooks.arm()

    def settle(self) -> None:
        """The backward is over: what has not been launched is; what is summed in place is there for users to see."""
        if self.replicated is not None:
            self.finish()
            return
        self.hooks.settle()
        self._absent = None

    def finish(self) -> None:
        """All gradients are reduced, late ones too; on all ranks together."""
        if self._alone:
            return
        if self.hooks.armed or self.hooks.dirty or (self.replicated is not None and self._absent is None):
            self.hooks.settle()
            self._absent = None
        self.wait()
        if self._absent is None:
            self._agree()

    def conclude(self) -> None:
        """Every rank takes an optimizer step now: `finish`, and an error on all ranks if one does something else."""
        if self._passes is not None:
            self._passes.forget_graphs()
        for reduction in self._reductions:
            reduction.stepped()
        if self._agreement is not None and self._absent is not None:
            self._exchange([0, 0, 0], "begin of an optimizer step")
            return
        if self._agreement is not None and not self._launched and self.hooks.clock is None:
            self.arm()  # others that had a backward wait for zeros
            self.hooks.begin()
            self.settle()
        self.finish()

    def change_unreduced(self, param: nn.Parameter, change: Callable[[Tensor | None], Tensor]) -> None:
        """Put what `change` makes of it in place of this rank's whole gradient, before it is reduced."""
        shard, holder = shard_of(param), param if self.replicated is None else self.replicated.holder(param)
        if shard is None or self.replicated is not None or param.grad is not None:
            holder.grad = change(holder.grad)
        else:
            shard.gradient = change(shard.gradient)
        self.hooks.dirty = True

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply every gradient that is held, whole or in pieces."""
        self.wait()
        pieces = [piece for group in self._groups() for piece in group.pieces]
        held = [piece.gradient for piece in pieces]
        for piece in pieces:
            if piece.norm is not None:
                piece.norm = piece.norm * abs(factor)
            if piece.picked is not None:
                piece.picked = piece.picked * factor
        whole = [grad for group in self._groups() for grad in group.whole_gradients()]
        whole += [grad for reduction in self._reductions for grad in reduction.local.values()]
        scale_([grad for grad in (*held, *whole) if grad is not None], factor)

    def forget(self) -> None:
        """The gradients were used or dropped; whatever arrives next is new."""
        self.hooks.forget()
        if self.hooks.inside:
            self.hooks.inside = False
            if self._passes is not None:
                self._passes.abandon()
        self._had.clear()
        self._absent = None
        self._launched = False
        self._in_flight.drop()
        for reduction in self._reductions:
            reduction.local.clear()
        for group in self._groups():
            for piece in group.pieces:
                piece.gradient = piece.picked = None

    def close(self) -> None:
        """Remove every hook."""
        self.hooks.close()
        self._in_flight.carry([])

    # ---- when buckets leave where parameters are gathered: see `zero.parameters.fetch_schedule`

    def learn(self, agreement: RankAgreement) -> _Learned | None:
        """The first rank's order from now on; returns where the pass was when each gradient came, if that is known."""
        if not self.hooks.armed or not self.hooks.final or self.hooks.more:
            return None
        buckets = self.hooks.buckets
        seen = buckets.learned()
        known, count = set(seen), len(self._entries)
        order = self._in_front(seen)
        positions = [buckets.positions.get(number, _NEVER) if number in known else _NEVER for number in range(count)]
        numbers = agreement.broadcast_numbers([*order, *positions], 2 * count)
        order, positions = numbers[:count], numbers[count:]
        unused = frozenset(number for number, position in enumerate(positions) if position == _NEVER)
        if (order, unused) != (self._order, self._unused):
            self._order, self._unused = order, unused
            self._rebuild()
        return _Learned(positions)

    def launch_before(self, learned: _Learned, step: int) -> None:
        """Let the buckets leave that leave before a step of a plan: those of which everything came before it."""
        if learned.version != self._version:
            learned.version, learned.places, known = self._version, [], learned.positions
            if len(known) == len(self._entries):  # else others are trained now: everything leaves at the end
                last = (max(known[self._number[id(p.param)]] for p in bucket) for bucket in self.buckets)
                learned.places = list(accumulate(last, max))
        places, gone = learned.places, self.hooks.buckets.next
        if gone < len(places) and places[gone] <= step:
            self.hooks.launch_until(bisect_right(places, step))

    # ---- buckets on their way

    @torch.no_grad()
    def _launch(self, place: int) -> None:
        self._launched = True
        bucket = self.buckets[place]
        self._had.update(self._in_flight.send(place, partial(self._ask_whole, bucket)))
        if not self._ways.overlap or (self._ways.strict and bucket[0].device.type == "cpu"):
            self.wait()

    def _ask_whole(self, bucket: Sequence[BucketEntry]) -> Pending[Tensor] | None:
        if self._consumer is None or self._agreement is None:
            return None
        return self._agreement.begin_flags([self._consumer.leaves_whole(entry.param) for entry in bucket])

    def _reduced(self, bucket: Bucket, flags: Pending[Tensor]) -> None:
        assert self._consumer is not None, "ranks were asked"
        answers = zip(bucket.entries, flags.wait().tolist(), strict=True)
        self._consumer.reduced([entry.param for entry, whole in answers if whole])

    def wait(self) -> None:
        """What is on its way has arrived; late gradients still wait for `finish`."""
        self._in_flight.wait()

    # ---- what ranks agree upon

    def _take_guess(self, used: Iterable[nn.Parameter]) -> None:
        """Before the first backward: the reverse of first use, with everything else at the end."""
        numbers = [self._number[id(param)] for param in used if id(param) in self._number]
        if numbers:
            self._order = self._in_front(reversed(dict.fromkeys(numbers)))
            self._rebuild()
        self._guessed = False

    def _in_front(self, numbers: Iterable[int]) -> list[int]:
        """These first, then the others in the order that they have."""
        return list(dict.fromkeys([*numbers, *self._order]))

    def _agree(self) -> None:
        """A second round for what was late on any rank, who had a gradient, and the order from now on."""
        if self._agreement is None:  # the buckets carry what ranks have to know
            for entry in self._by_rows:
                if entry.by_rows is not None:
                    entry.by_rows()
            self._absent = frozenset()
            return
        buckets, count = self.hooks.buckets, len(self._entries)
        had = {self._number[each] for each in self._had} | buckets.late
        late = {buckets.place_of(number) for number in buckets.late}
        order = self._proposal()
        said = self._exchange([digest(sorted(had)), len(late), order is not None], "agreement on gradients")
        if bool((said[:, 1] != said[0, 1]).any()):
            had = self._agreement.union(had, count)
        if bool(said[:, 2].any()):
            late = self._agreement.union(late, len(self.buckets))
        order = self._agreement.broadcast_numbers(order or (), count) if bool(said[0, 3]) else None
        buckets.late.clear()
        for place in sorted(late):
            self._launch(place)
        if late and self._passes is not None:
            self._passes.schedule.retrace()
        self.wait()
        self._absent = frozenset(range(count)) - had
        self._average_copies()
        if order is not None:
            self._order, self._unused = order, self._absent
            self._rebuild()

    @torch.no_grad()
    def _average_copies(self) -> None:
        """Take the means over ranks that hold equal shards, which reductions left for now; two are on their way."""
        if all(reduction.late is None for reduction in self._reductions):
            return
        absent = self._absent or frozenset()
        kept = [entry for number, entry in enumerate(self._entries) if number not in absent]
        flying: list[LateMean] = []
        for pieces in late_packs(kept, self._ways.limit):
            flying.append(LateMean(pieces))
            if len(flying) > 1:
                flying.pop(0).wait()
        for mean in flying:
            mean.wait()

    def _exchange(self, words: Sequence[int], what: str) -> Tensor:
        """What all ranks say with STEP before it; an error on all of them if one does something else."""
        assert self._agreement is not None, "asked where gradients are taken"
        said = self._agreement.exchange([STEP, *words], what)
        if bool((said[:, 0] != STEP).any()):
            raise self._agreement.disagreement("is about to take an optimizer step")
        return said

    def _proposal(self) -> list[int] | None:
        """The order in which gradients arrived here, if what was sent did not fit it; ever more seldom."""
        buckets = self.hooks.buckets
        self._patience -= 1
        if self._patience > 0 or not (buckets.late or buckets.forced or buckets.blocked):
            return None
        self._proposals += 1
        self._patience = 1 << max(self._proposals - 4, 0)
        order = self._in_front(buckets.learned())
        return None if order == self._order else order


def _arrived(consumer: GradientConsumer, param: nn.Parameter, take: Callable[[], None] | None) -> None:
    consumer.arrived(param)
    if take is not None:
        take()
