"""Memory that is free now, on devices and on hosts: what another process holds, a job does not get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host import HostMemory
from deepspeed.config.memory import size_text
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, by_host, counted, who
from deepspeed.preflight.host_memory import available_memory

__all__ = ["Memory", "MemoryFact"]

_DEVICE_FREE = 0.9  # a driver and an empty context take a few per cent
_HOST_FREE = 2**30  # for each rank, before it has read a weight


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """Bytes; none of a device where ranks compute on cores."""

    host_total: int
    host_free: int
    device_total: int | None = None
    device_free: int | None = None


class Memory(Check[MemoryFact]):
    """Devices are empty, and hosts have memory to spare."""

    name = "memory"
    about = "memory that is free on devices and hosts"
    fact = MemoryFact

    def gather(self, here: Here) -> MemoryFact:
        accelerator = get_accelerator()
        total, free = HostMemory().total(), available_memory()
        if accelerator.device_name() == "cpu" or here.local_rank >= accelerator.device_count():
            return MemoryFact(total, free)
        index = here.local_rank
        return MemoryFact(total, free, accelerator.total_memory(index), accelerator.available_memory(index))

    def judge(self, told: Sequence[Told[MemoryFact]]) -> list[Finding]:
        found = []
        busy = [each for each in told if _free_part(each.fact) < _DEVICE_FREE]
        if busy:
            worst = min(busy, key=lambda each: _free_part(each.fact)).fact
            free, total = size_text(worst.device_free or 0), size_text(worst.device_total or 0)
            what = f"{who(busy)}: as little as {free} of {total} of the device are free"
            ranks = tuple(each.rank for each in busy)
            advice = "end what else runs there (nvidia-smi shows it)"
            found.append(Finding(Level.WARNING, what, ranks, advice))
        for host, some in by_host(told).items():
            left = min(each.fact.host_free for each in some)
            if left < _HOST_FREE * len(some):
                what = f"host {host} has {size_text(left)} free for {counted(len(some), 'rank')}"
                ranks = tuple(each.rank for each in some)
                found.append(Finding(Level.WARNING, what, ranks, "end what else runs there, or start fewer ranks"))
        if found:
            return found
        least = size_text(min(each.fact.host_free for each in told))
        devices = [each.fact.device_free for each in told if each.fact.device_free is not None]
        device = f"{size_text(min(devices))} on every device, " if devices else ""
        return [Finding(Level.OK, f"free: at least {device}{least} on every host")]


def _free_part(fact: MemoryFact) -> float:
    if not fact.device_total or fact.device_free is None:
        return 1.0
    return fact.device_free / fact.device_total
