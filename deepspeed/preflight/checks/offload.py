"""Memory against the plan: what model states would take of devices, hosts and disks, and what is left.

Masters and moments go where `offload_optimizer` says, weights where `offload_param` says. Gradients of offloaded states
stay in host memory, in the width of the weights where a step has one micro batch, else in that of their sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from deepspeed.config.memory import size_text
from deepspeed.config.schema import Schema
from deepspeed.config.zero import OffloadDeviceEnum
from deepspeed.memory.budget import Widths
from deepspeed.precision.policy import Precision
from deepspeed.preflight.check import CheckFinding, Level, PreflightCheck, RankFact, ThisRank, by_host, name_ranks
from deepspeed.preflight.checks.machine import available_memory

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
    """The bytes of a parameter on each of `world` ranks."""
    zero, widths = schema.zero_optimization, widths_of(schema)
    stage = int(zero.stage)
    part = {role: 1 / world if stage >= first else 1.0 for role, first in (("states", 1), ("grads", 2), ("params", 3))}
    states = (widths.master + widths.optimizer) * part["states"]
    params, grads = widths.param * part["params"], widths.grad * part["grads"]
    device, host, disk = 0.0, 0.0, 0.0
    tier = OffloadDeviceEnum.none if zero.offload_optimizer is None else zero.offload_optimizer.device
    share = float(zero.offload_optimizer.ratio) if zero.offload_optimizer is not None else 0.0
    if tier is OffloadDeviceEnum.none:
        device += states + grads
    else:
        once = (schema.gradient_accumulation_steps or 1) == 1
        device += states * (1 - share) + (0.0 if once else grads)
        host += share * (widths.param if once else widths.grad) * part["states"]
        if tier is OffloadDeviceEnum.cpu:
            host += share * states
        else:
            disk += share * states
    home = OffloadDeviceEnum.none if zero.offload_param is None else zero.offload_param.device
    if stage < 3 or home is OffloadDeviceEnum.none:
        device += params
    elif home is OffloadDeviceEnum.cpu:
        host += params
    else:
        disk += params
    return BytesPerParameter(device, host, disk)


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
        if here.config is None or isinstance(here.config, str):
            return OffloadFact()
        schema = here.config.schema
        needs = needs_of(schema, here.world)
        accelerator = get_accelerator()
        has_device = accelerator.device_name() != "cpu" and here.local_rank < accelerator.device_count()
        path, free, error = _disk(schema)
        return OffloadFact(
            needs.device,
            needs.host,
            needs.disk,
            accelerator.available_memory(here.local_rank) if has_device else None,
            available_memory(),
            free,
            path,
            error,
            here.options.params,
        )

    def judge(self, told: Sequence[RankFact[OffloadFact]]) -> list[CheckFinding]:
        if any(each.fact.device is None for each in told):
            return [CheckFinding(Level.OK, "without a config there is no plan")]
        found = list(_disks(told))
        for host, some in by_host(told).items():
            found += _memory(host, some)
        found += _devices(told)
        return found or [CheckFinding(Level.OK, _summary(told))]


def _disk(schema: Schema) -> tuple[str, int | None, str | None]:
    """The folder of a swap file, the bytes that are free there, and why they are not known."""
    folders = schema.zero_optimization.swap_folders
    if not folders:
        return "", None, None
    path = folders[0]
    place = next((level for level in (path, *path.absolute().parents) if level.exists()), path)
    try:
        room = os.statvfs(place)
    except OSError as error:
        return str(path), None, str(error.strerror or error)
    if not os.access(place, os.W_OK | os.X_OK):
        return str(path), None, f"{place} cannot be written to"
    return str(path), room.f_bavail * room.f_frsize, None


def _disks(told: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    bad = [each for each in told if each.fact.disk_error is not None]
    if bad:
        what = f"{name_ranks(bad)}: no swap file in {bad[0].fact.disk_path}: {bad[0].fact.disk_error}"
        yield CheckFinding(
            Level.PROBLEM, what, tuple(each.rank for each in bad), "set nvme_path to a folder on a local disk"
        )


def _memory(host: str, some: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    """What the ranks of a host want of its memory and its disk."""
    first, ranks = some[0].fact, tuple(each.rank for each in some)
    if first.params is None:
        return
    kinds = (
        ("memory", sum(each.fact.host for each in some), min(each.fact.host_free for each in some)),
        ("disk", sum(each.fact.disk for each in some), first.disk_free),
    )
    for kind, each_param, free in kinds:
        needed = math.ceil(each_param * first.params)
        if free is None or needed <= _NEARLY * free:
            continue
        level = Level.PROBLEM if needed > free else Level.WARNING
        what = f"host {host}: the plan puts {size_text(needed)} into its {kind}, of which {size_text(free)} are free"
        yield CheckFinding(level, what, ranks, "use more hosts, fewer bytes (moment_bits, bf16), or offload less")


def _devices(told: Sequence[RankFact[OffloadFact]]) -> Iterator[CheckFinding]:
    short = []
    for each in told:
        fact = each.fact
        if (
            fact.params is not None
            and fact.device_free is not None
            and (fact.device or 0) * fact.params > fact.device_free
        ):
            short.append(each)
    if short:
        fact = short[0].fact
        needed = size_text(math.ceil((fact.device or 0) * (fact.params or 0)))
        free = size_text(fact.device_free or 0)
        what = f"{name_ranks(short)}: model states take {needed} of a device that has {free} free"
        advice = "use a higher ZeRO stage, more ranks, or offload_optimizer and offload_param"
        yield CheckFinding(Level.PROBLEM, what, tuple(each.rank for each in short), advice)


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
    limits = []
    for some in by_host(told).values():
        for each_param, free in (
            (sum(each.fact.host for each in some), min(each.fact.host_free for each in some)),
            (sum(each.fact.disk for each in some), some[0].fact.disk_free),
        ):
            if each_param and free is not None:
                limits.append(free / each_param)
    limits += [each.fact.device_free / each.fact.device for each in told if each.fact.device and each.fact.device_free]
    return f"{text}; at most {min(limits) / 1e9:.3g}B parameters fit" if limits else text
