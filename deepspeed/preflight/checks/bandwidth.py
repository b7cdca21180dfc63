"""Bandwidth: an all-reduce along every axis of the job, and messages between neighbours, which tell who is slow.

A collective takes as long as its slowest rank needs, so that its time names nobody. Messages between neighbours in a
ring do: a slow rank is slow with both of its neighbours, and those are fast with their other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as td

from deepspeed import comm
from deepspeed.bench.measure import seconds
from deepspeed.bench.operations import OPERATIONS, Room
from deepspeed.config import Loaded
from deepspeed.errors import LayoutError
from deepspeed.parallel import ParallelLayout
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, few, who
from deepspeed.preflight.slow import level_of, stragglers

__all__ = ["Bandwidth", "BandwidthFact", "axes_of", "ring_rounds"]

_TRIALS = 3
_MESSAGE = 4  # a message has this part of the bytes of a collective


@dataclass(frozen=True, slots=True)
class BandwidthFact:
    """Axis → the first rank of this rank's group, its size, and bytes per second of the bus; neighbour → the same."""

    axes: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)


class Bandwidth(Check[BandwidthFact]):
    """Ranks exchange bytes equally fast."""

    name = "bandwidth"
    about = "speed of collectives along each axis, with slow ranks named"
    together = True
    fact = BandwidthFact

    def gather(self, here: Here) -> BandwidthFact:
        assert here.company is not None, "this check needs all ranks"
        sizes = _sizes(here.config)
        axes = {}
        for name, groups in axes_of(here.company.hosts, **sizes).items():
            own = next((ranks for ranks in groups if here.rank in ranks), (here.rank,))
            if len(own) > 1:
                axes[name] = (own[0], len(own), _along(own, here))
        return BandwidthFact(axes, _links(here))

    def judge(self, told: Sequence[Told[BandwidthFact]]) -> list[Finding]:
        if len(told) < 2:
            return [Finding(Level.OK, "one rank has nobody to send to")]
        found = [*_slow_ranks(told), *_slow_groups(told)]
        speeds = _speeds(told)
        shown = ", ".join(f"{axis} {min(groups.values()) / 1e9:.3g} GB/s" for axis, groups in speeds.items())
        return found or [Finding(Level.OK, f"bus bandwidth of an all-reduce: {shown}")]


def axes_of(hosts: Sequence[str], *, sp: int = 1, tp: int = 1) -> dict[str, list[tuple[int, ...]]]:
    """Axis → its groups of ranks: all, those of a host, those with the same place on every host, and the config's."""
    world = len(hosts)
    axes: dict[str, list[tuple[int, ...]]] = {"world": [tuple(range(world))]}
    places: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault(host, []).append(rank)
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
    rounds = [edges[0::2], edges[1::2]]
    if world > 2:
        last = (world - 1, 0)
        if world % 2 == 0:
            rounds[1].append(last)
        else:
            rounds.append([last])
    return [pairs for pairs in rounds if pairs]


def _sizes(config: Loaded | str | None) -> dict[str, int]:
    if config is None or isinstance(config, str):
        return {}
    return config.schema.axis_sizes


def _along(ranks: Sequence[int], here: Here) -> float:
    """Bytes per second of the bus in an all-reduce of these ranks."""
    assert here.company is not None, "this check needs all ranks"
    whole = len(ranks) == here.world
    # Only members make a group, so that a thousand hosts do not make each other's.
    group = None if whole else td.new_group(list(ranks), use_local_synchronization=True)
    room = Room(group, len(ranks), ranks.index(here.rank), torch.float32, here.company.device)
    operation = OPERATIONS["all_reduce"]
    elements = room.elements(here.options.size)
    call = operation.prepare(room, elements)
    best = min(seconds(call, room.device, trials=1, warmups=1) for _ in range(_TRIALS))
    if group is not None:
        td.destroy_process_group(group)
    return elements * room.dtype.itemsize * operation.bus(len(ranks)) / best


def _links(here: Here) -> dict[str, float]:
    """Neighbour in the ring → bytes per second of a message to it and one back."""
    assert here.company is not None, "this check needs all ranks"
    elements = max(1, here.options.size // _MESSAGE // 4)
    sent = torch.zeros(elements, device=here.company.device)
    received = torch.zeros(elements, device=here.company.device)
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


def _slow_ranks(told: Sequence[Told[BandwidthFact]]) -> Iterator[Finding]:
    """Ranks whose best neighbour is far from them."""
    best = {each.rank: max(each.fact.links.values()) for each in told if each.fact.links}
    slow = stragglers(best)
    if not slow or len(told) < 3:  # of two, each is as slow as the other
        return
    worst = min(slow.values())
    verb = "exchanges" if len(slow) == 1 else "exchange"
    what = f"{who(among(told, slow))} {verb} messages at {worst:.0%} of the usual speed with every neighbour"
    advice = "look at the network and at other processes there; leave the host out if it stays slow"
    yield Finding(level_of(slow), what, tuple(slow), advice)


def _speeds(told: Sequence[Told[BandwidthFact]]) -> dict[str, dict[int, float]]:
    """Axis → the first rank of each group → the speed of the slowest rank in it."""
    speeds: dict[str, dict[int, float]] = {}
    for each in told:
        for axis, (first, _, speed) in each.fact.axes.items():
            groups = speeds.setdefault(axis, {})
            groups[first] = min(speed, groups.get(first, speed))
    return speeds


def _members(told: Sequence[Told[BandwidthFact]], axis: str, first: int) -> list[int]:
    return [each.rank for each in told if each.fact.axes.get(axis, (None,))[0] == first]


def _slow_groups(told: Sequence[Told[BandwidthFact]]) -> Iterator[Finding]:
    for axis, groups in _speeds(told).items():
        slow: Mapping[int, float] = stragglers(groups)
        for first, part in slow.items():
            ranks = _members(told, axis, first)
            what = f"ranks {few(ranks)} ({axis}) are at {part:.0%} of the usual speed of that axis: "
            what += f"{groups[first] / 1e9:.3g} GB/s"
            yield Finding(level_of({first: part}), what, tuple(ranks), "look at the links between these ranks")
