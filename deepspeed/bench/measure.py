"""The time of an operation: by events where a device works behind the host's back, by the host's clock elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator.clock import mark
from deepspeed.accelerator.host import HostEvent
from deepspeed.bench.operations import OPERATIONS, Call, Room

__all__ = ["Sample", "seconds", "slowest", "sweep"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation at one size: the mean time of the slowest rank, and what follows from it, in bytes per second."""

    operation: str
    nbytes: int
    seconds: float
    algorithm: float
    bus: float


def seconds(call: Call, device: torch.device, *, trials: int, warmups: int) -> float:
    """The mean time of a call on this rank, over `trials` of them one after another on tensors of this device."""
    for _ in range(warmups):
        _finish(call())
    start = _mark(device)
    for _ in range(trials):
        _finish(call())
    end = _mark(device)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / trials


def _mark(device: torch.device) -> Any:
    """This point in time; gloo moves memory of the host, whatever devices there are."""
    if device.type != "cpu":
        return mark()
    event = HostEvent()
    event.record()
    return event


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def slowest(own: float, room: Room) -> float:
    """The largest of all ranks' numbers, on all of them."""
    worst = torch.tensor([own], dtype=torch.float64, device=room.device)
    comm.all_reduce(worst, op=comm.ReduceOp.MAX, group=room.group)
    return float(worst.item())


def sweep(
    names: Sequence[str], sizes: Sequence[int], room: Room, *, trials: int, warmups: int
) -> Iterator[Sample | tuple[str, str]]:
    """Every operation at every size; one that the backend does not have is (its name, why)."""
    for name in names:
        operation = OPERATIONS[name]
        try:
            _finish(operation.prepare(room, room.elements(1))())
        except (RuntimeError, ValueError, TypeError) as error:  # on all ranks alike: it was refused before any exchange
            yield name, str(error).splitlines()[0]
            continue
        for size in sizes:
            elements = room.elements(size)
            call = operation.prepare(room, elements)
            comm.barrier(group=room.group)
            taken = slowest(seconds(call, room.device, trials=trials, warmups=warmups), room)
            nbytes = elements * room.dtype.itemsize
            algorithm = nbytes / taken
            yield Sample(name, nbytes, taken, algorithm, algorithm * operation.bus(room.world))
