"""Gradients to their owners: arrival → the order all ranks share → bucket → reduction → the pieces of this rank.

Stage 1 lets whole gradients add up on the parameters and reduces in the last backward before the optimizer; stages 2
and 3 reduce in every backward and add up shards. Everything else is the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from deepspeed.comm import Pending
from deepspeed.ops.multi_tensor import scale_
from deepspeed.zero.agreement import Hosts
from deepspeed.zero.gradients.arrivals import Arrivals
from deepspeed.zero.gradients.bucket import Bucket, Parcel
from deepspeed.zero.gradients.council import Council
from deepspeed.zero.gradients.flights import Flights
from deepspeed.zero.gradients.landing import Landing, told_first
from deepspeed.zero.gradients.order import pack_buckets
from deepspeed.zero.gradients.passes import Passes
from deepspeed.zero.gradients.reduction import Reduction
from deepspeed.zero.parameters.shard import shard_of
from deepspeed.zero.states.group import ShardGroup

__all__ = ["ShardReducer", "Ways"]

_NEVER = 1 << 40  # later than any step
_WAITING = 2  # buckets that may wait for others to complete before they leave incomplete


@dataclass(frozen=True)
class Ways:
    """How gradients of an engine leave."""

    every_backward: bool
    """Whole gradients do not outlive a backward."""
    limit: int
    """Elements per bucket."""
    overlap: bool = True
    """Let backward go on while gradients travel."""
    strict: bool = False
    """The user sized the buckets. On a host, where what comes needs as much memory as what goes, one lands at once."""
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


class ShardReducer:
    """Reduces the gradients of some groups; the groups may change between steps."""

    def __init__(
        self,
        groups: Callable[[], Sequence[ShardGroup]],
        reduction_of: Callable[[ShardGroup], Reduction],
        ways: Ways,
        council: Council,
        *,
        registered: Callable[[], Iterable[nn.Parameter]],
        passes: Passes | None = None,
    ) -> None:
        """`registered` are the parameters in the model's order; `passes` is told when a backward begins and ends."""
        self._groups = groups
        self._reduction_of = reduction_of
        self._ways = ways
        self.eager = ways.every_backward
        """True if gradients are reduced in every backward."""
        self._council = council
        self._version = 0
        self._model, self._passes = registered, passes
        self.arrivals = Arrivals(self._launch, early=ways.early)
        """When gradients come and leave."""
        self._parcels: list[Parcel] = []
        self._number: dict[int, int] = {}
        self._order: list[int] = []
        self._unused: frozenset[int] = frozenset()
        self._guessed = True
        self._proposals = self._patience = 0
        self._buckets: list[Bucket] = []
        self._flights = Flights(self._landed)
        self._landing: Landing | None = None
        self._flags: tuple[bool, ...] = ()
        self._had: set[int] = set()  # ids of parameters, which outlive their numbers
        self._absent: frozenset[int] | None = None
        self._launched = False
        self._kept: frozenset[int] = frozenset()
        self.refresh()

    # ---- what is trained

    def refresh(self) -> None:
        """Look again at which parameters are trained; one frozen after its gradient came counts until the step."""
        groups, departures = self._groups(), self.arrivals.departures
        before = self._number if self._had or departures.late or self.arrivals.dirty else {}
        flags = tuple(param.requires_grad or id(param) in before for group in groups for param in group.params)
        if flags == self._flags:
            return
        self._flags = flags
        late = [id(self._parcels[number].param) for number in departures.late]
        everything = [(group, parcel) for group in groups for parcel in group.parcels(self._reduction_of(group))]
        trained = [item for item in everything if item[1].param.requires_grad or id(item[1].param) in before]
        self._parcels = [parcel for _, parcel in trained]
        self._number = {id(parcel.param): number for number, parcel in enumerate(self._parcels)}
        self._order, self._unused, self._guessed = self._registered(), frozenset(), True
        self.arrivals.close()
        self.arrivals.relearn()
        self._rebuild()
        self.arrivals.departures.late = {self._number[each] for each in late}
        for number, (group, parcel) in enumerate(trained):
            followed = None if id(parcel.param) in self._kept else number
            if parcel.param.requires_grad:
                self.arrivals.hook(parcel.name, parcel.param, followed, told_first(self._landing, parcel.param, group))

    def use_up(self, landing: Landing) -> None:
        """Hand gradients over as they land, on all ranks together."""
        self._council.open_polls()
        self._landing, self._flags = landing, ()
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
            range(len(self._parcels)), key=lambda number: -places.get(id(self._parcels[number].param), last + number)
        )

    def _rebuild(self) -> None:
        sizes = [parcel.numel for parcel in self._parcels]
        kinds = [parcel.kind for parcel in self._parcels]
        last = {number for number, parcel in enumerate(self._parcels) if id(parcel.param) in self._kept}
        order = [number for number in self._order if number not in last]
        packed = pack_buckets(order, sizes, kinds, self._ways.limit, unused=self._unused)
        kept = pack_buckets(sorted(last), sizes, kinds, self._ways.limit)
        packed += kept
        self._buckets = [Bucket([self._parcels[number] for number in numbers]) for numbers in packed]
        self._version += 1
        largest = max((sum(sizes[number] for number in numbers) for numbers in packed), default=0)
        self.arrivals.watch(packed, sizes, _WAITING * largest, kept=len(kept))

    # ---- what happened

    def had_gradient(self, param: nn.Parameter) -> bool:
        """True if this rank sent a gradient of the parameter since the last `forget`."""
        return id(param) in self._had

    def note_gradient(self, param: nn.Parameter) -> None:
        """A gradient of the parameter was given by other means than a backward."""
        if id(param) in self._number:
            self._had.add(id(param))
            self._absent = None

    def absent(self) -> list[nn.Parameter]:
        """Trained parameters of which no rank has had a gradient; known once `conclude` was called."""
        return [self._parcels[number].param for number in sorted(self._absent or ())]

    @property
    def empty(self) -> bool:
        """True if no rank has had any gradient; known once `conclude` was called."""
        return self._absent is not None and len(self._absent) == len(self._parcels)

    # ---- a backward

    def announce(self, begun: Callable[[], None], arrived: Callable[[], None]) -> None:
        """In a backward that the engine did not begin, call `begun` before any gradient, else `arrived` after one."""
        self.arrivals.notice = arrived
        if self._passes is not None:
            self._passes.notice = begun

    def enter_backward(self) -> None:
        """A backward begins."""
        self.arrivals.inside = True
        if self._passes is not None:
            self._passes.begin_backward()

    def leave_backward(self) -> None:
        """A backward is over."""
        self.arrivals.inside = False
        if self._passes is not None:
            self._passes.end_backward()

    def reopen(self) -> None:
        """More gradients are about to come: what was reduced lies with its owners, new ones are added to it."""

    def arm(self) -> None:
        """The backward that starts now is to be reduced while it runs."""
        if self._guessed and self._passes is not None:
            self._take_guess(self._passes.first_uses())
        self.arrivals.arm()

    def begin(self) -> None:
        """Called from inside the outermost backward, before any gradient arrives."""
        self.arrivals.begin()

    def settle(self) -> None:
        """The backward is over: what has not been launched is."""
        self.arrivals.settle()
        self._absent = None

    def finish(self) -> None:
        """All gradients lie with their owners, late ones too; on all ranks together."""
        if self.arrivals.armed or self.arrivals.dirty:
            self.settle()
        self.land()
        if self._absent is None:
            self._agree()

    def conclude(self) -> None:
        """Every rank takes an optimizer step now: `finish`, and an error on all ranks if one does something else."""
        if self._passes is not None:
            self._passes.forget_graphs()
        if self._absent is None:
            if not self._launched and self.arrivals.clock is None:  # others that had a backward wait for zeros
                self.arm()
                self.begin()
                self.settle()
            self.finish()
        else:
            self._council.confirm()

    def change_unreduced(self, param: nn.Parameter, change: Callable[[Tensor | None], Tensor]) -> None:
        """Put what `change` makes of it in place of this rank's whole gradient, before it is reduced."""
        shard = shard_of(param)
        if shard is None or param.grad is not None:
            param.grad = change(param.grad)
        else:
            shard.gradient = change(shard.gradient)
        self.arrivals.dirty = True

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply every gradient that is held, whole or in pieces."""
        self.land()
        pieces = [piece for group in self._groups() for piece in group.pieces]
        held = [piece.gradient for piece in pieces]
        for piece in pieces:
            if piece.norm is not None:
                piece.norm = piece.norm * abs(factor)
            if piece.picked is not None:
                piece.picked = piece.picked * factor
        whole = [grad for group in self._groups() for grad in group.whole_gradients()]
        scale_([grad for grad in (*held, *whole) if grad is not None], factor)

    def forget(self) -> None:
        """The gradients were used or dropped; whatever arrives next is new."""
        self.arrivals.forget()
        if self.arrivals.inside:
            self.arrivals.inside = False
            if self._passes is not None:
                self._passes.abandon()
        self._had.clear()
        self._absent = None
        self._launched = False
        self._flights.drop()
        for group in self._groups():
            for piece in group.pieces:
                piece.gradient = piece.picked = None

    def close(self) -> None:
        """Remove every hook."""
        self.arrivals.close()
        self._buckets.clear()

    # ---- when buckets leave where parameters are gathered, too: `deepspeed.zero.parameters.passes.Departing`

    def ready(self) -> tuple[int, int]:
        """How many buckets may have left by now, and how many must have because too much waits."""
        return self.arrivals.ready()

    def depart(self, until: int) -> None:
        """Let buckets leave until so many have."""
        self.arrivals.depart(until)

    def learn(self, hosts: Hosts) -> _Learned | None:
        """The first rank's order from now on; returns where the pass was when each gradient came, if that is known."""
        if not self.arrivals.armed or not self.arrivals.final or self.arrivals.more:
            return None
        departures = self.arrivals.departures
        seen = departures.learned()
        known, count = set(seen), len(self._parcels)
        order = [*seen, *(number for number in self._order if number not in known)]
        positions = [departures.positions.get(number, _NEVER) if number in known else _NEVER for number in range(count)]
        told = hosts.tell([*order, *positions], 2 * count)
        order, positions = told[:count], told[count:]
        unused = frozenset(number for number, position in enumerate(positions) if position == _NEVER)
        if (order, unused) != (self._order, self._unused):
            self._order, self._unused = order, unused
            self._rebuild()
        return _Learned(positions)

    def until(self, learned: _Learned, step: int) -> int:
        """How many buckets leave before a step of a plan: those of which everything came before it."""
        if learned.version != self._version:
            learned.version, learned.places, known = self._version, [], learned.positions
            if len(known) == len(self._parcels):  # else others are trained now: everything leaves at the end
                last = (max(known[self._number[id(p.param)]] for p in bucket.parcels) for bucket in self._buckets)
                learned.places = list(accumulate(last, max))
        return bisect_right(learned.places, step)

    # ---- buckets on their way

    @torch.no_grad()
    def _launch(self, place: int) -> None:
        bucket = self._buckets[place]
        self._launched = True
        self._flights.make_room(bucket)
        grads = [parcel.take() for parcel in bucket.parcels]
        for parcel, grad in zip(bucket.parcels, grads, strict=True):
            if grad is not None:
                self._had.add(id(parcel.param))
        packed = bucket.pack(grads)
        del grads
        told = None
        if self._landing is not None:
            told = self._council.poll([self._landing.leaves_whole(parcel.param) for parcel in bucket.parcels])
        self._flights.send(bucket, packed, told)
        if not self._ways.overlap or (self._ways.strict and bucket.device.type == "cpu"):
            self.land()

    def _landed(self, bucket: Bucket, told: Pending[Tensor]) -> None:
        assert self._landing is not None, "somebody asked"
        answers = zip(bucket.parcels, told.wait().tolist(), strict=True)
        self._landing.landed([parcel.param for parcel, whole in answers if whole])

    def land(self) -> None:
        """What is on its way has arrived; late gradients still wait for `finish`."""
        self._flights.land()

    # ---- what ranks agree upon

    def _take_guess(self, used: Iterable[nn.Parameter]) -> None:
        """Before the first backward: the reverse of first use, with everything else at the end."""
        numbers = [self._number[id(param)] for param in used if id(param) in self._number]
        if numbers:
            first = list(dict.fromkeys(numbers))
            seen = set(first)
            self._order = [*reversed(first), *(number for number in self._order if number not in seen)]
            self._rebuild()
        self._guessed = False

    def _agree(self) -> None:
        """A second round for what was late on any rank, who had a gradient, and the order from now on."""
        departures = self.arrivals.departures
        verdict = self._council.meet(
            had={self._number[each] for each in self._had} | departures.late,
            late={departures.place_of(number) for number in departures.late},
            order=self._proposal(),
            sizes=(len(self._parcels), len(self._buckets)),
        )
        departures.late.clear()
        for place in verdict.late:
            self._launch(place)
        if verdict.late and self._passes is not None:
            self._passes.retrace()
        self.land()
        self._absent = frozenset(range(len(self._parcels))) - verdict.had
        if verdict.order is not None:
            self._order = verdict.order
            self._unused = self._absent
            self._rebuild()

    def _proposal(self) -> list[int] | None:
        """The order in which gradients arrived here, if what was sent did not fit it; ever more seldom."""
        departures = self.arrivals.departures
        self._patience -= 1
        if self._patience > 0 or not (departures.late or departures.forced or departures.blocked):
            return None
        self._proposals += 1
        self._patience = 1 << max(self._proposals - 4, 0)
        seen = departures.learned()
        known = set(seen)
        order = [*seen, *(number for number in self._order if number not in known)]
        return None if order == self._order else order
