"""Devices and memory: each rank has a device, what a job needs is free, and the states of the model fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostMemory
from deepspeed.config.memory import size_text
from deepspeed.config.schema import Schema
from deepspeed.config.zero import OffloadDeviceEnum
from deepspeed.launcher.facts import SHM_WANTED, shared_memory
from deepspeed.memory.budget import Widths
from deepspeed.precision.policy import Precision
from deepspeed.preflight.check import (
    CheckFinding,
    Level,
    PreflightCheck,
    RankFact,
    ThisRank,
    by_host,
    counted,
    finding,
    grouped,
    name_ranks,
    passed,
    unlike_most,
)
from deepspeed.preflight.checks.folder import nearest

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
            return [passed(f"{counted(len(told), 'rank')} on cores of the CPU")]
        return [passed(f"{len(told)} × {first.name or first.accelerator}, one rank on each")]


def _kinds(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    for field, level, advice in (
        ("accelerator", Level.PROBLEM, "ds_report tells there why; or set DS_ACCELERATOR for all"),
        ("name", Level.WARNING, "leave those hosts out, or expect their speed of all"),
    ):
        for value, usual, some in unlike_most(told, [getattr(each.fact, field) for each in told]):
            if value is not None and usual is not None:
                yield finding(level, f"{name_ranks(some)}: {field} {value}, and {usual} elsewhere", some, advice)


def _absent(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    none = [each for each in told if each.fact.accelerator != "cpu" and each.fact.index >= each.fact.count]
    if none:
        fact = none[0].fact
        what = f"{name_ranks(none)}: no device number {fact.index}, {fact.count} {fact.accelerator} devices are visible"
        yield finding(Level.PROBLEM, what, none, "start fewer ranks there, or let them see more devices")


def _shared(told: Sequence[RankFact[DeviceFact]]) -> Iterator[CheckFinding]:
    users = grouped(((each.host, each.fact.identity), each) for each in told if each.fact.identity is not None)
    for (_, identity), some in users.items():
        if len(some) > 1:
            what = f"{name_ranks(some)} share the device {identity}"
            yield finding(Level.PROBLEM, what, some, "give each its own LOCAL_RANK, or its own visible devices")


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
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" is no number
        return None


# ---- memory


def free_on_device(index: int) -> int | None:
    """Bytes that are free on a device; None where ranks compute on cores, or there is no such device."""
    accelerator = get_accelerator()
    there = accelerator.device_name() != "cpu" and index < accelerator.device_count()
    return accelerator.available_memory(index) if there else None


_DEVICE_FREE = 0.9  # a driver and an empty context take a few per cent
_HOST_FREE = 2**30  # for each rank, before it has read a weight


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Bytes; none of a device where ranks compute on cores."""

    host_free: int
    device_total: int | None = None
    device_free: int | None = None


class MemoryCheck(PreflightCheck[MemoryFact]):
    """Devices are empty, and hosts have memory to spare."""

    name = "memory"
    fact = MemoryFact

    def gather(self, here: ThisRank) -> MemoryFact:
        free = free_on_device(here.local_rank)
        total = None if free is None else get_accelerator().total_memory(here.local_rank)
        return MemoryFact(available_memory(), total, free)

    def judge(self, told: Sequence[RankFact[MemoryFact]]) -> list[CheckFinding]:
        found = []
        busy = [each for each in told if _free_part(each.fact) < _DEVICE_FREE]
        if busy:
            worst = min(busy, key=lambda each: _free_part(each.fact)).fact
            free, total = size_text(worst.device_free or 0), size_text(worst.device_total or 0)
            what = f"{name_ranks(busy)}: as little as {free} of {total} of the device are free"
            found.append(finding(Level.WARNING, what, busy, "end what else runs there (nvidia-smi shows it)"))
        for host, some in by_host(told).items():
            left = min(each.fact.host_free for each in some)
            if left < _HOST_FREE * len(some):
                what = f"host {host} has {size_text(left)} free for {counted(len(some), 'rank')}"
                found.append(finding(Level.WARNING, what, some, "end what else runs there, or start fewer ranks"))
        least = size_text(min(each.fact.host_free for each in told))
        devices = [each.fact.device_free for each in told if each.fact.device_free is not None]
        device = f"{size_text(min(devices))} on every device, " if devices else ""
        return found or [passed(f"free: at least {device}{least} on every host")]


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
            total, free = some[0].fact.total, some[0].fact.free
            if total is None or free is None:
                found.append(finding(Level.WARNING, f"host {host} has no /dev/shm", some, _ADVICE))
                continue
            needed = _FOR_A_RANK * len(some)
            if len(some) > 1 and some[0].fact.nccl and free < needed:
                what = f"host {host}: {size_text(free)} free in /dev/shm, and {len(some)} ranks of NCCL need about "
                found.append(finding(Level.PROBLEM, what + size_text(needed), some, _ADVICE))
            elif total < SHM_WANTED:
                what = f"host {host}: /dev/shm holds only {size_text(total)}; data-loader workers may fail"
                found.append(finding(Level.WARNING, what, some, _ADVICE))
        least = min((each.fact.free for each in told if each.fact.free is not None), default=0)
        return found or [passed(f"at least {size_text(least)} free on every host")]


# ---- the states of the model against the memory
#
# Masters and moments go where `offload_optimizer` says, weights where `offload_param` says. Gradients of offloaded
# states stay in host memory, in the width of the weights where a step has one micro batch, else in that of their sum.

_MOMENTS = {"lion": 1, "adagrad": 1, "muon": 1, "rmsprop": 1}  # others are taken for Adam's kind, which has two


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes that one rank holds of each parameter of the model, by the kind of memory; a fraction where ranks share."""

    device: float
    host: float
    disk: float


def widths_of(schema: Schema) -> Widths:
    """Bytes of an element in each role."""
    precision = Precision.from_config(schema)
    optimizer = schema.optimizer
    name, params = str(optimizer.type or "").lower(), optimizer.params or {}
    count = _MOMENTS.get(name.removeprefix("deepspeedcpu").removeprefix("fused"), 2)
    if name == "sgd":
        count = 1 if params.get("momentum") else 0
    bits = params.get("moment_bits")
    width = bits // 8 if bits in (8, 16) else precision.state.itemsize
    away = schema.zero_optimization.offloads_optimizer
    return Widths(
        param=precision.param.itemsize,
        grad=precision.accumulate.itemsize,
        master=precision.master.itemsize if precision.has_master or away else 0,
        optimizer=count * width,
    )


def needs_of(schema: Schema, world: int) -> BytesPerParameter:
    """The bytes of a parameter on each of `world` ranks; layers that ranks share are taken to be the whole model."""
    zero, widths = schema.zero_optimization, widths_of(schema)
    stage, slices = int(zero.stage), schema.axis_sizes["tp"]
    shards = zero.mics_shard_size if zero.mics_shard_size > 0 else max(world // slices, 1)
    first = {"states": 1, "grads": 2, "params": 3}
    part = {role: 1 / (slices * (shards if stage >= least else 1)) for role, least in first.items()}
    states = (widths.master + widths.optimizer) * part["states"]
    params, grads = widths.param * part["params"], widths.grad * part["grads"]
    held = dict.fromkeys((OffloadDeviceEnum.none, OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme), 0.0)
    offload = zero.offload_optimizer
    if offload is None or offload.device is OffloadDeviceEnum.none:
        held[OffloadDeviceEnum.none] += states + grads
    else:
        share, once = float(offload.ratio), (schema.gradient_accumulation_steps or 1) == 1
        held[OffloadDeviceEnum.none] += states * (1 - share) + (0.0 if once else grads)
        held[OffloadDeviceEnum.cpu] += share * (widths.param if once else widths.grad) * part["states"]
        held[offload.device] += share * states
    away = zero.offload_param.device if stage >= 3 and zero.offload_param is not None else OffloadDeviceEnum.none
    held[away] += params
    return BytesPerParameter(*held.values())


_NEARLY = 0.8  # activations, the data loader and the page cache want some, too


@dataclass(frozen=True, slots=True)
class OffloadFact:
    """Bytes of a parameter on this rank (`None` without a config), and bytes that are free."""

    device: float | None = None
    host: float = 0.0
    disk: float = 0.0
    device_free: int | None = None
    host_free: int = 0
    disk_free: int | None = None
    disk_path: str = ""
    disk_error: str | None = None
    params: int | None = None


class OffloadCheck(PreflightCheck[OffloadFact]):
    """The states of the model fit where the config puts them."""

    name = "offload"
    fact = OffloadFact

    def gather(self, here: ThisRank) -> OffloadFact:
        schema = here.schema
        if schema is None:
            return OffloadFact()
        needs = needs_of(schema, here.world)
        free = (free_on_device(here.local_rank), available_memory(), *_disk(schema))
        return OffloadFact(needs.device, needs.host, needs.disk, *free, here.options.params)

    def judge(self, told: Sequence[RankFact[OffloadFact]]) -> list[CheckFinding]:
        if any(each.fact.device is None for each in told):
            return [passed("without a config there is no plan")]
        found = [*_disks(told), *(each for some in by_host(told).values() for each in _memory(some)), *_devices(told)]
        return found or [passed(_summary(told))]


def _disk(schema: Schema) -> tuple[int | None, str, str | None]:
    """The bytes that are free in the folder of a swap file, the folder, and why they are not known."""
    folders = schema.zero_optimization.swap_folders
    if not folders:
        return None, "", None
    path = folders[0]
    place = nearest(path.absolute())
    try:
        room = os.statvfs(place)
    except OSError as error:
        return None, str(path), str(error.strerror or error)
    if not os.access(place, os.W_OK | os.X_OK):
        return None, str(path), f"{place} cannot be written to"
    return room.f_bavail * room.f_frsize, str(path), None


def _disks(told: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    bad = [each for each in told if each.fact.disk_error is not None]
    if bad:
        what = f"{name_ranks(bad)}: no swap file in {bad[0].fact.disk_path}: {bad[0].fact.disk_error}"
        yield finding(Level.PROBLEM, what, bad, "set nvme_path to a folder on a local disk")


def _demands(some: Sequence[RankFact[OffloadFact]]) -> Iterator[tuple[str, float, int]]:
    """What the ranks of a host hold of each parameter in its memory and on its disk, and the bytes that are free."""
    yield "memory", sum(each.fact.host for each in some), min(each.fact.host_free for each in some)
    if some[0].fact.disk_free is not None:
        yield "disk", sum(each.fact.disk for each in some), some[0].fact.disk_free


def _memory(some: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    """What the ranks of a host want of its memory and its disk."""
    params = some[0].fact.params
    if params is None:
        return
    for kind, bytes_each, free in _demands(some):
        needed = math.ceil(bytes_each * params)
        if needed > _NEARLY * free:
            level = Level.PROBLEM if needed > free else Level.WARNING
            what = f"the plan puts {size_text(needed)} into its {kind}, of which {size_text(free)} are free"
            advice = "use more hosts, fewer bytes (moment_bits, bf16), or offload less"
            yield finding(level, f"host {some[0].host}: {what}", some, advice)


def _devices(told: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    short = [
        each for each in told if each.fact.device_free is not None and _on_device(each.fact) > each.fact.device_free
    ]
    if short:
        fact = short[0].fact
        needed, free = size_text(math.ceil(_on_device(fact))), size_text(fact.device_free or 0)
        what = f"{name_ranks(short)}: model states take {needed} of a device that has {free} free"
        advice = "use a higher ZeRO stage, more ranks, or offload_optimizer and offload_param"
        yield finding(Level.PROBLEM, what, short, advice)


def _on_device(fact: OffloadFact) -> float:
    """Bytes of the model on the rank's device; 0 where its size is not known."""
    return (fact.device or 0) * (fact.params or 0)


def _summary(told: Sequence[RankFact[OffloadFact]]) -> str:
    """Bytes of a parameter, and of how many parameters there could be."""
    first = told[0].fact
    parts = [f"{first.device or 0:.3g} B on its device"]
    parts += [
        f"{value:.3g} B of its host's {kind}" for kind, value in (("memory", first.host), ("disk", first.disk)) if value
    ]
    text = f"a rank holds of each parameter {', '.join(parts)}"
    if first.params is not None:
        return f"{text}; {first.params / 1e9:.3g}B parameters fit"
    demands = (each for some in by_host(told).values() for each in _demands(some))
    limits = [free / bytes_each for _, bytes_each, free in demands if bytes_each]
    limits += [each.fact.device_free / each.fact.device for each in told if each.fact.device and each.fact.device_free]
    return f"{text}; at most {min(limits) / 1e9:.3g}B parameters fit" if limits else text
