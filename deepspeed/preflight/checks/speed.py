"""Speed: clocks compared, a matrix product on every rank, an all-reduce along every axis, messages between neighbours.

A collective takes as long as its slowest rank needs, so that its time names no rank. Messages between neighbours in a
ring do: a slow rank is slow with both of its neighbours, and those are fast with their other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as td

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.bench.operations import OPERATIONS, BenchSetting, seconds
from deepspeed.errors import LayoutError
from deepspeed.parallel import ParallelLayout
from deepspeed.preflight.check import (
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    among,
    few,
    finding,
    grouped,
    level_of,
    name_ranks,
    passed,
    stragglers,
)

# ---- clocks of hosts

_ROUNDS = 8
_WARNED = 0.5  # seconds
_WRONG = 5.0  # as long as torch's elastic rendezvous waits for a sign of life


@dataclass(frozen=True, slots=True)
class ClockFact:
    """Seconds by which a host's clock is ahead of rank 0's, and how exact that is; none where nobody measured."""

    ahead: float | None = None
    exact: float = 0.0


class ClockCheck(PreflightCheck[ClockFact]):
    """Each host asks rank 0 for the time, and takes the answer that came back fastest."""

    name = "clock"
    together = True
    fact = ClockFact

    def gather(self, here: ThisRank) -> ClockFact:
        group = here.all_ranks.messages
        if here.rank == 0:
            answer, question = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            for other in here.all_ranks.first_ranks:
                for _ in range(_ROUNDS if other else 0):
                    td.recv(question, other, group=group)
                    answer[0] = here.now()
                    td.send(answer, other, group=group)
            return ClockFact(0.0)
        if here.rank not in here.all_ranks.first_ranks:
            return ClockFact()
        trips = []
        told = torch.zeros(1, dtype=torch.int64)
        for _ in range(_ROUNDS):
            sent = here.now()
            td.send(told, 0, group=group)
            td.recv(told, 0, group=group)
            trips.append((sent, int(told.item()), here.now()))
        return offset_of(trips)

    def judge(self, told: Sequence[RankFact[ClockFact]]) -> list[CheckFinding]:
        known = [each for each in told if each.fact.ahead is not None]
        found = []
        for each in known:
            ahead = each.fact.ahead or 0.0
            certain = abs(ahead) - each.fact.exact
            if certain > _WARNED:
                level = Level.PROBLEM if certain > _WRONG else Level.WARNING
                way = "ahead of" if ahead > 0 else "behind"
                what = f"the clock of {name_ranks([each])} is {abs(ahead):.3g} s {way} that of rank 0"
                found.append(finding(level, what, [each], "let NTP or chrony set the clocks of all hosts"))
        if found:
            return found
        if len(known) < 2:
            return [passed("one host, one clock")]
        worst = max(abs(each.fact.ahead or 0.0) for each in known)
        return [passed(f"{len(known)} hosts agree within {max(worst * 1e3, 0.001):.3g} ms")]


def offset_of(trips: Sequence[tuple[int, int, int]]) -> ClockFact:
    """From (sent, their time, received) in nanoseconds: of the shortest trip, half of which is what we do not know."""
    sent, theirs, received = min(trips, key=lambda trip: trip[2] - trip[0])
    return ClockFact(((sent + received) / 2 - theirs) / 1e9, (received - sent) / 2e9)


# ---- computing

_CPU, _DEVICE = 512, 4096  # rows of the matrices
_PRODUCTS = 5


@dataclass(frozen=True, slots=True)
class ComputeFact:
    """Floating-point operations per second, in the fastest of a few trials."""

    speed: float


class ComputeCheck(PreflightCheck[ComputeFact]):
    """Ranks compute equally fast, while all of them do."""

    name = "compute"
    together = True
    fact = ComputeFact

    def gather(self, here: ThisRank) -> ComputeFact:
        accelerator = get_accelerator()
        on_device = accelerator.device_name() != "cpu"
        device = torch.device(accelerator.device_name(here.local_rank) if on_device else "cpu")
        dtype = torch.bfloat16 if on_device and accelerator.is_bf16_supported() else torch.float32
        rows = _DEVICE if on_device else _CPU
        left = torch.ones(rows, rows, dtype=dtype, device=device)
        out = torch.empty_like(left)

        def multiply() -> None:
            torch.mm(left, left, out=out)

        best = min(seconds(multiply, device, trials=1, warmups=1) for _ in range(_PRODUCTS))
        return ComputeFact(2 * rows**3 / best)

    def judge(self, told: Sequence[RankFact[ComputeFact]]) -> list[CheckFinding]:
        slow = stragglers({each.rank: each.fact.speed for each in told})
        if not slow:
            least = min(each.fact.speed for each in told)
            return [passed(f"every rank computes at {least / 1e12:.3g} TFLOP/s or more")]
        worst = min(slow.values())
        verb = "computes" if len(slow) == 1 else "compute"
        what = f"{name_ranks(among(told, slow))} {verb} at {worst:.0%} of the usual speed"
        advice = "look for other processes, heat or a power limit there; leave the host out if it stays slow"
        return [CheckFinding(level_of(slow), what, tuple(slow), advice)]


# ---- bandwidth

_TRIALS = 3
_MESSAGE = 4  # a message has this part of the bytes of a collective


@dataclass(frozen=True, slots=True)
class BandwidthFact:
    """Axis → the first rank of this rank's group, its size, and bytes per second of the bus; neighbour → the same."""

    axes: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)


class BandwidthCheck(PreflightCheck[BandwidthFact]):
    """Ranks exchange bytes equally fast."""

    name = "bandwidth"
    together = True
    fact = BandwidthFact

    def gather(self, here: ThisRank) -> BandwidthFact:
        sizes = {} if here.schema is None else here.schema.axis_sizes
        axes = {}
        for name, groups in axes_of(here.all_ranks.hosts, **sizes).items():
            own = next((ranks for ranks in groups if here.rank in ranks), (here.rank,))
            if len(own) > 1:
                axes[name] = (own[0], len(own), _along(own, here))
        return BandwidthFact(axes, _links(here))

    def judge(self, told: Sequence[RankFact[BandwidthFact]]) -> list[CheckFinding]:
        if len(told) < 2:
            return [passed("one rank has nobody to send to")]
        found = [*_slow_ranks(told), *_slow_groups(told)]
        speeds = _speeds(told)
        shown = ", ".join(f"{axis} {min(groups.values()) / 1e9:.3g} GB/s" for axis, groups in speeds.items())
        return found or [passed(f"bus bandwidth of an all-reduce: {shown}")]


def axes_of(hosts: Sequence[str], *, sp: int = 1, tp: int = 1) -> dict[str, list[tuple[int, ...]]]:
    """Axis → its groups of ranks: all, those of a host, those with the same place on every host, and the config's."""
    world = len(hosts)
    axes: dict[str, list[tuple[int, ...]]] = {"world": [tuple(range(world))]}
    places = grouped((host, rank) for rank, host in enumerate(hosts))
    if len(places) > 1:
        most = max(map(len, places.values()))
        within = [tuple(ranks) for ranks in places.values() if len(ranks) > 1]
        between = [tuple(ranks[at] for ranks in places.values() if at < len(ranks)) for at in range(most)]
        axes |= {"within a host": within} if within else {}
        if most > 1:
            axes["between hosts"] = [ranks for ranks in between if len(ranks) > 1]
    if sp > 1 or tp > 1:
        try:
            plan = ParallelLayout.plan(world=world, sp=sp, tp=tp)
        except LayoutError:
            return axes  # which the check of the config tells
        axes |= {name: list(plan[(name,)].groups) for name, size in plan.sizes.items() if 1 < size < world}
    return axes


def ring_rounds(world: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring, in rounds in which every rank has at most one partner."""
    edges = [(rank, rank + 1) for rank in range(world - 1)]
    rounds = [edges[0::2], edges[1::2], []]
    if world > 2:
        rounds[1 + world % 2].append((world - 1, 0))
    return [pairs for pairs in rounds if pairs]


def _along(ranks: Sequence[int], here: ThisRank) -> float:
    """Bytes per second of the bus in an all-reduce of these ranks."""
    whole = len(ranks) == here.world
    # Only members make a group, so that a thousand hosts do not make each other's.
    group = None if whole else td.new_group(list(ranks), use_local_synchronization=True)
    room = BenchSetting(group, len(ranks), ranks.index(here.rank), torch.float32, here.all_ranks.device)
    operation = OPERATIONS["all_reduce"]
    elements = room.elements(here.options.size)
    call = operation.prepare(room, elements)
    best = min(seconds(call, room.device, trials=1, warmups=1) for _ in range(_TRIALS))
    if group is not None:
        td.destroy_process_group(group)
    return elements * room.dtype.itemsize * operation.bus(len(ranks)) / best


def _links(here: ThisRank) -> dict[str, float]:
    """Neighbour in the ring → bytes per second of a message to it and one back."""
    elements = max(1, here.options.size // _MESSAGE // 4)
    sent = torch.zeros(elements, device=here.all_ranks.device)
    received = torch.zeros(elements, device=here.all_ranks.device)
    found = {}
    for pairs in ring_rounds(here.world):
        partner = next((sum(pair) - here.rank for pair in pairs if here.rank in pair), None)
        comm.barrier()
        if partner is None:
            continue

        def exchange(other: int = partner) -> None:
            acts = [td.P2POp(td.isend, sent, other), td.P2POp(td.irecv, received, other)]
            for work in td.batch_isend_irecv(acts):
                work.wait()

        best = min(seconds(exchange, sent.device, trials=1, warmups=1) for _ in range(_TRIALS))
        found[str(partner)] = elements * 4 / best
    return found


def _slow_ranks(told: Sequence[RankFact[BandwidthFact]]) -> Iterator[CheckFinding]:
    """Ranks whose best neighbour is far from them."""
    best = {each.rank: max(each.fact.links.values()) for each in told if each.fact.links}
    slow = stragglers(best)
    if not slow or len(told) < 3:  # of two, each is as slow as the other
        return
    worst = min(slow.values())
    verb = "exchanges" if len(slow) == 1 else "exchange"
    what = f"{name_ranks(among(told, slow))} {verb} messages at {worst:.0%} of the usual speed with every neighbour"
    advice = "look at the network and at other processes there; leave the host out if it stays slow"
    yield CheckFinding(level_of(slow), what, tuple(slow), advice)


def _speeds(told: Sequence[RankFact[BandwidthFact]]) -> dict[str, dict[int, float]]:
    """Axis → the first rank of each group → the speed of the slowest rank in it."""
    speeds: dict[str, dict[int, float]] = {}
    for each in told:
        for axis, (first, _, speed) in each.fact.axes.items():
            groups = speeds.setdefault(axis, {})
            groups[first] = min(speed, groups.get(first, speed))
    return speeds


def _slow_groups(told: Sequence[RankFact[BandwidthFact]]) -> Iterator[CheckFinding]:
    for axis, groups in _speeds(told).items():
        for first, part in stragglers(groups).items():
            some = [each for each in told if each.fact.axes.get(axis, (None,))[0] == first]
            what = (
                f"ranks {few([each.rank for each in some])} ({axis}) are at {part:.0%} of the usual speed of that axis"
            )
            what = f"{what}: {groups[first] / 1e9:.3g} GB/s"
            yield finding(level_of({first: part}), what, some, "look at the links between these ranks")
