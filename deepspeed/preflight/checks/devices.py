"""Devices: each rank has one, of the same kind, and none is used by two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, counted, odd_ones, who

__all__ = ["DeviceFact", "Devices"]


@dataclass(frozen=True, slots=True)
class DeviceFact:
    """The device that a rank takes: `index` among the `count` that it sees; `identity` tells devices apart."""

    accelerator: str
    count: int
    index: int
    name: str | None = None
    identity: str | None = None


class Devices(Check[DeviceFact]):
    """One rank, one device."""

    name = "devices"
    about = "one rank on each device, all of the same kind"
    fact = DeviceFact

    def gather(self, here: Here) -> DeviceFact:
        accelerator = get_accelerator()
        kind, count = accelerator.device_name(), accelerator.device_count()
        if kind == "cpu" or here.local_rank >= count:
            return DeviceFact(kind, count, here.local_rank)
        if kind != "cuda":
            return DeviceFact(kind, count, here.local_rank, accelerator.device_name(here.local_rank))
        properties = torch.cuda.get_device_properties(here.local_rank)
        identity = str(getattr(properties, "uuid", "")) or None  # older torch does not tell it
        return DeviceFact(kind, count, here.local_rank, properties.name, identity)

    def judge(self, told: Sequence[Told[DeviceFact]]) -> list[Finding]:
        found = [*_kinds(told), *_absent(told), *_shared(told)]
        if found:
            return found
        first = told[0].fact
        if first.accelerator == "cpu":
            return [Finding(Level.OK, f"{counted(len(told), 'rank')} on cores of the CPU")]
        return [Finding(Level.OK, f"{len(told)} × {first.name or first.accelerator}, one rank on each")]


def _kinds(told: Sequence[Told[DeviceFact]]) -> Iterator[Finding]:
    for field, level, advice in (
        ("accelerator", Level.PROBLEM, "ds_report tells there why; or set DS_ACCELERATOR for all"),
        ("name", Level.WARNING, "leave those hosts out, or expect their speed of all"),
    ):
        usual, others = odd_ones({each.rank: getattr(each.fact, field) for each in told})
        for value, ranks in others.items():
            if value is not None and usual is not None:
                place = who(among(told, ranks))
                yield Finding(level, f"{place}: {field} {value}, and {usual} elsewhere", tuple(ranks), advice)


def _absent(told: Sequence[Told[DeviceFact]]) -> Iterator[Finding]:
    none = [each for each in told if each.fact.accelerator != "cpu" and each.fact.index >= each.fact.count]
    if none:
        fact = none[0].fact
        what = f"{who(none)}: no device number {fact.index}, {fact.count} {fact.accelerator} devices are visible"
        ranks = tuple(each.rank for each in none)
        yield Finding(Level.PROBLEM, what, ranks, "start fewer ranks there, or let them see more devices")


def _shared(told: Sequence[Told[DeviceFact]]) -> Iterator[Finding]:
    users: dict[tuple[str, str], list[Told[DeviceFact]]] = {}
    for each in told:
        if each.fact.identity is not None:
            users.setdefault((each.host, each.fact.identity), []).append(each)
    for (_, identity), some in users.items():
        if len(some) > 1:
            ranks = tuple(each.rank for each in some)
            yield Finding(
                Level.PROBLEM,
                f"{who(some)} share the device {identity}",
                ranks,
                "give each its own LOCAL_RANK, or its own visible devices",
            )
