"""Devices, memory and shared memory of the hosts: each rank has one device, and what a job needs is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostMemory
from deepspeed.config.memory import size_text
from deepspeed.launcher.facts import SHM_WANTED, shared_memory
from deepspeed.preflight.check import (
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    among,
    by_host,
    counted,
    minority_values,
    name_ranks,
)

# ---- devices


@dataclass(frozen=True, slots=True)
class DeviceFact:
    """The device that a rank takes: `index` among the `count` that it sees; `identity` tells devices apart."""

    accelerator: str
    count: int
    index: int
    name: str | None = None
    identity: str | None = None


class DevicesCheck(PreflightCheck[DeviceFact]):
    """One rank, one device."""

    name = "devices"
    fact = DeviceFact

    def gather(self, here: ThisRank) -> DeviceFact:
        accelerator = get_accelerator()
        kind, count = accelerator.device_name(), accelerator.device_count()
        if kind == "cpu" or here.local_rank >= count:
            return DeviceFact(kind, count, here.local_rank)
        if kind != "cuda":
            return DeviceFact(kind, count, here.local_rank, accelerator.device_name(here.local_rank))
        properties = torch.cuda.get_device_properties(here.local_rank)
        identity = str(getattr(properties, "uuid", "")) or None  # older torch does not tell it
        return DeviceFact(kind, count, here.local_rank, properties.name, identity)

    def judge(self, told: Sequence[RankFact[DeviceFact]]) -> list[CheckFinding]:
        found = [*_kinds(told), *_absent(told), *_shared(told)]
        if found:
            return found
        first = told[0].fact
        if first.accelerator == "cpu":
            return [CheckFinding(Level.OK, f"{counted(len(told), 'rank')} on cores of the CPU")]
        return [CheckFinding(Level.OK, f"{len(told)} × {first.name or first.accelerator}, one rank on each")]


def _kinds(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    for field, level, advice in (
        ("accelerator", Level.PROBLEM, "ds_report tells there why; or set DS_ACCELERATOR for all"),
        ("name", Level.WARNING, "leave those hosts out, or expect their speed of all"),
    ):
        usual, others = minority_values({each.rank: getattr(each.fact, field) for each in told})
        for value, ranks in others.items():
            if value is not None and usual is not None:
                place = name_ranks(among(told, ranks))
                yield CheckFinding(level, f"{place}: {field} {value}, and {usual} elsewhere", tuple(ranks), advice)


def _absent(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    none = [each for each in told if each.fact.accelerator != "cpu" and each.fact.index >= each.fact.count]
    if none:
        fact = none[0].fact
        what = f"{name_ranks(none)}: no device number {fact.index}, {fact.count} {fact.accelerator} devices are visible"
        ranks = tuple(each.rank for each in none)
        yield CheckFinding(Level.PROBLEM, what, ranks, "start fewer ranks there, or let them see more devices")


def _shared(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    users: dict[tuple[str, str], list[RankFact[DeviceFact]]] = {}
    for each in told:
        if each.fact.identity is not None:
            users.setdefault((each.host, each.fact.identity), []).append(each)
    for (_, identity), some in users.items():
        if len(some) > 1:
            ranks = tuple(each.rank for each in some)
            yield CheckFinding(
                Level.PROBLEM,
                f"{name_ranks(some)} share the device {identity}",
                ranks,
                "give each its own LOCAL_RANK, or its own visible devices",
            )


# ---- memory of a host, within the limits of its container

_TREES = (
    # the tree, the file of the limit, the file of the use: version 2 and version 1
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes that can be allocated on this host without swapping, and without the end of the container."""
    free = HostMemory().available()
    room = container_room()
    return free if room is None else min(free, room)


def container_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes until the nearest limit of this process's control groups; None without any."""
    rooms = []
    for folder, limit_name, use_name in _TREES:
        tree = root / folder
        place = tree / _own_group(own, folder).lstrip("/")
        for level in (place, *place.parents):
            if level != tree and tree not in level.parents:
                break
            limit, use = _number(level / limit_name), _number(level / use_name)
            if limit is not None and use is not None and limit < 2**60:  # version 1 writes a huge number for no limit
                rooms.append(max(0, limit - use))
    return min(rooms, default=None)


def _own_group(file: Path, controller: str) -> str:
    """The path of this process in a tree, `/` where it is not told or belongs to another view of the tree."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, names, path = [*line.split(":", 2), "", "", ""][:3]
        if (names == "" and not controller) or (controller and controller in names.split(",")):
            return "/" if ".." in path.split("/") else path
    return "/"


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return None
    return int(text) if text.isdigit() else None


# ---- memory

_DEVICE_FREE = 0.9  # a driver and an empty context take a few per cent
_HOST_FREE = 2**30  # for each rank, before it has read a weight


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Bytes; none of a device where ranks compute on cores."""

    host_total: int
    host_free: int
    device_total: int | None = None
    device_free: int | None = None


class MemoryCheck(PreflightCheck[MemoryFact]):
    """Devices are empty, and hosts have memory to spare."""

    name = "memory"
    fact = MemoryFact

    def gather(self, here: ThisRank) -> MemoryFact:
        accelerator = get_accelerator()
        total, free = HostMemory().total(), available_memory()
        if accelerator.device_name() == "cpu" or here.local_rank >= accelerator.device_count():
            return MemoryFact(total, free)
        index = here.local_rank
        return MemoryFact(total, free, accelerator.total_memory(index), accelerator.available_memory(index))

    def judge(self, told: Sequence[RankFact[MemoryFact]]) -> list[CheckFinding]:
        found = []
        busy = [each for each in told if _free_part(each.fact) < _DEVICE_FREE]
        if busy:
            worst = min(busy, key=lambda each: _free_part(each.fact)).fact
            free, total = size_text(worst.device_free or 0), size_text(worst.device_total or 0)
            what = f"{name_ranks(busy)}: as little as {free} of {total} of the device are free"
            ranks = tuple(each.rank for each in busy)
            advice = "end what else runs there (nvidia-smi shows it)"
            found.append(CheckFinding(Level.WARNING, what, ranks, advice))
        for host, some in by_host(told).items():
            left = min(each.fact.host_free for each in some)
            if left < _HOST_FREE * len(some):
                what = f"host {host} has {size_text(left)} free for {counted(len(some), 'rank')}"
                ranks = tuple(each.rank for each in some)
                found.append(CheckFinding(Level.WARNING, what, ranks, "end what else runs there, or start fewer ranks"))
        if found:
            return found
        least = size_text(min(each.fact.host_free for each in told))
        devices = [each.fact.device_free for each in told if each.fact.device_free is not None]
        device = f"{size_text(min(devices))} on every device, " if devices else ""
        return [CheckFinding(Level.OK, f"free: at least {device}{least} on every host")]


def _free_part(fact: MemoryFact) -> float:
    if not fact.device_total or fact.device_free is None:
        return 1.0
    return fact.device_free / fact.device_total


# ---- /dev/shm

_FOR_A_RANK = 32 * 2**20  # which NCCL takes for the channels to the other ranks of a host
_ADVICE = "in Docker --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory at /dev/shm"


@dataclass(frozen=True, slots=True)
class ShmFact:
    """Bytes of the file system; none where there is no such file system."""

    total: int | None
    free: int | None
    nccl: bool


class SharedMemoryCheck(PreflightCheck[ShmFact]):
    """Shared memory is large enough for the ranks of each host."""

    name = "shared_memory"
    fact = ShmFact

    def gather(self, here: ThisRank) -> ShmFact:
        found = shared_memory()
        nccl = get_accelerator().communication_backend_name() == "nccl"
        return ShmFact(None if found is None else found.total, None if found is None else found.free, nccl)

    def judge(self, told: Sequence[RankFact[ShmFact]]) -> list[CheckFinding]:
        found = []
        for host, some in by_host(told).items():
            ranks = tuple(each.rank for each in some)
            total, free = some[0].fact.total, some[0].fact.free
            if total is None or free is None:
                found.append(CheckFinding(Level.WARNING, f"host {host} has no /dev/shm", ranks, _ADVICE))
                continue
            needed = _FOR_A_RANK * len(some)
            if len(some) > 1 and some[0].fact.nccl and free < needed:
                what = f"host {host}: {size_text(free)} free in /dev/shm, and {len(some)} ranks of NCCL need about "
                found.append(CheckFinding(Level.PROBLEM, what + size_text(needed), ranks, _ADVICE))
            elif total < SHM_WANTED:
                what = f"host {host}: /dev/shm holds only {size_text(total)}; data-loader workers may fail"
                found.append(CheckFinding(Level.WARNING, what, ranks, _ADVICE))
        if found:
            return found
        least = min(each.fact.free for each in told if each.fact.free is not None)
        return [CheckFinding(Level.OK, f"at least {size_text(least)} free on every host")]
