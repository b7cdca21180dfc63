"""The operations that are measured: the tensors of each, the call, its time, and what its bytes mean on the wires.

The size of an operation is that of its largest tensor: what an all-gather ends with, what a reduce-scatter begins with.
Algorithm bandwidth is that size by the time. Bus bandwidth is what each rank sends in the best algorithm for one link
per rank, by the time: it does not depend on the number of ranks, and can be held against the speed of the links. Both
count tensors, also where codes of them are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.accelerator.clock import mark
from deepspeed.accelerator.host import HostEvent
from deepspeed.comm.codec import Codec

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """Where an operation runs: its ranks, the kind of its tensors, and whose functions are called."""

    group: ProcessGroup | None
    world: int
    rank: int
    """Within the group."""
    dtype: torch.dtype
    device: torch.device
    module: ModuleType = comm
    """`deepspeed.comm` or `torch.distributed`, which have the same calls."""
    asynchronous: bool = False
    codec: Codec | None = None
    """What tensors are encoded in before they are sent, and decoded from; None: they are sent as they are."""

    def tensor(self, elements: int) -> torch.Tensor:
        """One that nobody has written to yet but with zeros, so that sums stay finite."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)

    @property
    def coder(self) -> Codec:
        """The codec, where there is one."""
        assert self.codec is not None, "operations with codes have a codec"
        return self.codec

    def member(self, place: int) -> int:
        """The global rank at this place of the group."""
        return comm.get_global_rank(self.group, place) if self.group is not None else place

    def elements(self, nbytes: int) -> int:
        """So many elements of a tensor that every rank has an equal part of, for at least so many bytes."""
        part = -(-nbytes // (self.dtype.itemsize * self.world))
        return max(1, part) * self.world


Prepare = Callable[[BenchSetting, int], Call]


@dataclass(frozen=True, slots=True)
class BenchOperation:
    """One kind of exchange."""

    name: str
    bus: Callable[[int], float]
    """Bus bandwidth by algorithm bandwidth, for so many ranks."""
    prepare: Prepare
    """Tensors of so many elements, and the call that moves them; it returns what can be waited for, or None."""
    about: str
    coded: Prepare | None = None
    """The same with codes instead of tensors."""


def _pt2pt(room: BenchSetting, elements: int) -> Call:
    """Rank 2k sends to rank 2k + 1, all pairs at once; the last of an odd number of ranks has nobody."""
    partner = room.rank ^ 1
    if partner >= room.world:
        return lambda: None
    tensor, other = room.tensor(elements), room.member(partner)
    begin = room.module.isend if room.rank % 2 == 0 else room.module.irecv
    # A message that is not waited for by its receiver has not arrived, so that there is no other way to time it.
    return lambda: begin(tensor, other, group=room.group)


def _ring(world: int) -> float:
    return (world - 1) / world


def _once(world: int) -> float:
    return 1.0


def _collective(name: str, operands: Callable[[BenchSetting, int], tuple[Any, ...]]) -> Prepare:
    def prepare(room: BenchSetting, elements: int) -> Call:
        function, own = getattr(room.module, name), operands(room, elements)
        return lambda: function(*own, group=room.group, async_op=room.asynchronous)

    return prepare


_all_reduce = _collective("all_reduce", lambda room, n: (room.tensor(n),))
_all_gather = _collective("all_gather_into_tensor", lambda room, n: (room.tensor(n), room.tensor(n // room.world)))
_reduce_scatter = _collective("reduce_scatter_tensor", lambda room, n: (room.tensor(n // room.world), room.tensor(n)))
_all_to_all = _collective("all_to_all_single", lambda room, n: (room.tensor(n), room.tensor(n)))
_broadcast = _collective("broadcast", lambda room, n: (room.tensor(n), room.member(0)))
_reduce = _collective("reduce", lambda room, n: (room.tensor(n), room.member(0)))


def _coded_gather(room: BenchSetting, elements: int) -> Call:
    part, whole = room.tensor(elements // room.world), room.tensor(elements).view(room.world, -1)
    codes, codec = _codes(room, 1, part.numel()), room.coder
    came = codes.new_empty(room.world, codes.shape[1])

    def call() -> None:
        codec.encode(part.view(1, -1), codes)
        room.module.all_gather_into_tensor(came.view(-1), codes.view(-1), group=room.group)
        codec.decode(came, whole)

    return call


def _coded_exchange(room: BenchSetting, elements: int, *, add: bool) -> Call:
    rows = room.tensor(elements).view(room.world, -1)
    codes, codec = _codes(room, *rows.shape), room.coder
    came, out = torch.empty_like(codes), room.tensor(rows.shape[1]) if add else room.tensor(elements).view_as(rows)
    decode = codec.decode_sum if add else codec.decode

    def call() -> None:
        codec.encode(rows, codes)
        room.module.all_to_all_single(came.view(-1), codes.view(-1), group=room.group)
        decode(came, out)

    return call


def _coded_sum(room: BenchSetting, elements: int) -> Call:
    reduce, gather = _coded_exchange(room, elements, add=True), _coded_gather(room, elements)

    def call() -> None:
        reduce()
        gather()

    return call


def _codes(room: BenchSetting, rows: int, elements: int) -> torch.Tensor:
    return torch.empty(rows, room.coder.nbytes(elements), dtype=torch.uint8, device=room.device)


OPERATIONS: Mapping[str, BenchOperation] = {
    each.name: each
    for each in (
        BenchOperation(
            "all_reduce", lambda world: 2 * _ring(world), _all_reduce, "sums of all ranks, on all ranks", _coded_sum
        ),
        BenchOperation("all_gather", _ring, _all_gather, "every rank's part, on all ranks", _coded_gather),
        BenchOperation(
            *("reduce_scatter", _ring, _reduce_scatter, "sums of all ranks, a part of them on each"),
            partial(_coded_exchange, add=True),
        ),
        BenchOperation(
            *("all_to_all", _ring, _all_to_all, "a part of every rank for every rank"),
            partial(_coded_exchange, add=False),
        ),
        BenchOperation("broadcast", _once, _broadcast, "from the first rank to all"),
        BenchOperation("reduce", _once, _reduce, "sums of all ranks, on the first"),
        BenchOperation("pt2pt", _once, _pt2pt, "from rank 2k to rank 2k + 1, all pairs at once"),
    )
}


# ---- time: by events of a device, by the clock of the host


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


def slowest(own: float, room: BenchSetting) -> float:
    """The largest of all ranks' numbers, on all of them."""
    worst = torch.tensor([own], dtype=torch.float64, device=room.device)
    comm.all_reduce(worst, op=comm.ReduceOp.MAX, group=room.group)
    return float(worst.item())


def sweep(
    names: Sequence[str], sizes: Sequence[int], room: BenchSetting, *, trials: int, warmups: int
) -> Iterator[Sample | tuple[str, str]]:
    """Every operation at every size; one that the backend does not have is (its name, why)."""
    for name in names:
        operation = OPERATIONS[name]
        prepare = operation.prepare if room.codec is None else operation.coded
        assert prepare is not None, "operations without codes are not asked for them"
        try:
            _finish(prepare(room, room.elements(1))())
        except (RuntimeError, ValueError, TypeError) as error:  # on all ranks alike: it was refused before any exchange
            yield name, str(error).splitlines()[0]
            continue
        for size in sizes:
            elements = room.elements(size)
            call = prepare(room, elements)
            comm.barrier(group=room.group)
            taken = slowest(seconds(call, room.device, trials=trials, warmups=warmups), room)
            nbytes = elements * room.dtype.itemsize
            algorithm = nbytes / taken
            yield Sample(name, nbytes, taken, algorithm, algorithm * operation.bus(room.world))
