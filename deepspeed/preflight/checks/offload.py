"""Memory against the plan: what model states would take of devices, hosts and disks, and what is left."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from deepspeed.config.memory import size_text
from deepspeed.config.schema import Schema
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, by_host, who
from deepspeed.preflight.host_memory import available_memory
from deepspeed.preflight.plan import needs_of

__all__ = ["Offload", "OffloadFact"]

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


class Offload(Check[OffloadFact]):
    """The states of the model fit where the config puts them."""

    name = "offload"
    about = "memory of hosts, devices and disks against the plan of the config"
    fact = OffloadFact

    def gather(self, here: Here) -> OffloadFact:
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

    def judge(self, told: Sequence[Told[OffloadFact]]) -> list[Finding]:
        if any(each.fact.device is None for each in told):
            return [Finding(Level.OK, "without a config there is no plan")]
        found = list(_disks(told))
        for host, some in by_host(told).items():
            found += _memory(host, some)
        found += _devices(told)
        return found or [Finding(Level.OK, _summary(told))]


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


def _disks(told: Sequence[Told[OffloadFact]]) -> Iterator[Finding]:
    bad = [each for each in told if each.fact.disk_error is not None]
    if bad:
        what = f"{who(bad)}: no swap file in {bad[0].fact.disk_path}: {bad[0].fact.disk_error}"
        yield Finding(
            Level.PROBLEM, what, tuple(each.rank for each in bad), "set nvme_path to a folder on a local disk"
        )


def _memory(host: str, some: Sequence[Told[OffloadFact]]) -> Iterator[Finding]:
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
        yield Finding(level, what, ranks, "use more hosts, fewer bytes (moment_bits, bf16), or offload less")


def _devices(told: Sequence[Told[OffloadFact]]) -> Iterator[Finding]:
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
        what = f"{who(short)}: model states take {needed} of a device that has {size_text(fact.device_free or 0)} free"
        advice = "use a higher ZeRO stage, more ranks, or offload_optimizer and offload_param"
        yield Finding(Level.PROBLEM, what, tuple(each.rank for each in short), advice)


def _summary(told: Sequence[Told[OffloadFact]]) -> str:
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
