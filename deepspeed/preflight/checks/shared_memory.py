"""`/dev/shm`: NCCL and data-loader workers pass memory through it, and containers often have little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from deepspeed.config.memory import size_text
from deepspeed.launcher.facts import SHM_WANTED, shared_memory
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, by_host

__all__ = ["SharedMemoryCheck", "ShmFact"]

_FOR_A_RANK = 32 * 2**20  # which NCCL takes for the channels to the other ranks of a host
_ADVICE = "in Docker --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory at /dev/shm"


@dataclass(frozen=True, slots=True)
class ShmFact:
    """Bytes of the file system; none where there is no such file system."""

    total: int | None
    free: int | None
    nccl: bool


class SharedMemoryCheck(Check[ShmFact]):
    """Shared memory is large enough for the ranks of each host."""

    name = "shared_memory"
    about = "size of /dev/shm"
    fact = ShmFact

    def gather(self, here: Here) -> ShmFact:
        found = shared_memory()
        nccl = get_accelerator().communication_backend_name() == "nccl"
        return ShmFact(None if found is None else found.total, None if found is None else found.free, nccl)

    def judge(self, told: Sequence[Told[ShmFact]]) -> list[Finding]:
        found = []
        for host, some in by_host(told).items():
            ranks = tuple(each.rank for each in some)
            total, free = some[0].fact.total, some[0].fact.free
            if total is None or free is None:
                found.append(Finding(Level.WARNING, f"host {host} has no /dev/shm", ranks, _ADVICE))
                continue
            needed = _FOR_A_RANK * len(some)
            if len(some) > 1 and some[0].fact.nccl and free < needed:
                what = f"host {host}: {size_text(free)} free in /dev/shm, and {len(some)} ranks of NCCL need about "
                found.append(Finding(Level.PROBLEM, what + size_text(needed), ranks, _ADVICE))
            elif total < SHM_WANTED:
                what = f"host {host}: /dev/shm holds only {size_text(total)}; data-loader workers may fail"
                found.append(Finding(Level.WARNING, what, ranks, _ADVICE))
        if found:
            return found
        least = min(each.fact.free for each in told if each.fact.free is not None)
        return [Finding(Level.OK, f"at least {size_text(least)} free on every host")]
