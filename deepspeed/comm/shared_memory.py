"""Collectives of CPU ranks of one host through memory that they share, instead of the sockets of gloo.

[Note: shared memory] Each rank has an anonymous memory file for each group, which the others map. An operation writes
what this rank sends into it and publishes a number; `wait` reads what the others published under the same number. So
the wait for an operation depends on nothing but its start on the other ranks, as with gloo. A rank reuses a place once
all ranks, itself included, have marked it as read, and makes its file larger where none is free. Nothing has to be
removed: the memory goes with the last process that has it. Sums run in the order of the ranks, so that all ranks get
the same bits.

Waiting is by futex. The kernel raises the published number, which orders the writes before it on every processor; its
waiting, too, is a barrier. Ranks meet in a blocking call only: one that returns at once must not wait for others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from deepspeed.comm.processes import has_ended, host_key, process_state, supported
from deepspeed.log import warn_once

SMALLEST, LARGEST = 32 << 10, 64 << 20  # bytes of a message; gloo is as fast below, and needs less memory above
_READERS = 8  # ranks up to which each reads all that an all-reduce sums
_RANKS = 16  # a rank has a file of each rank open
_SLOTS = 1024  # operations that may be under way
_TABLE = 4096  # where the table begins, in bytes
_MARKS = _TABLE + _SLOTS * 32  # a byte for each operation and rank: it has read it
_DATA = _MARKS + _SLOTS * _RANKS
_ALIGN = 64
_PUBLISHED, _CLOSED = 0, 1  # 4-byte words
_LOOK = 0.1  # seconds between looks whether the others still live
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE_OP, _ADD_ONE, _ALL = 0, 5, (1 << 28) | (1 << 12) | 0xFFF, 0x7FFFFFFF
_SUMS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}
_REDUCE: dict[Any, Callable[..., Tensor]] = {
    td.ReduceOp.SUM: torch.add,
    td.ReduceOp.MAX: torch.maximum,
    td.ReduceOp.MIN: torch.minimum,
}
_OPS = list(_REDUCE)
_DTYPES = {dtype: number for number, dtype in enumerate(sorted(_SUMS, key=str))}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_call = _FUTEX.get(platform.machine(), -1)
_while = ctypes.byref(_Timespec(0, int(_LOOK * 1e9)))


def _publish(address: int) -> None:
    """Raise the number at that address by one, after all that was written before, and wake who waits for it."""
    place = ctypes.c_void_p(address)
    _libc.syscall(_call, place, _WAKE_OP, _ALL, ctypes.c_void_p(_ALL), place, ctypes.c_uint32(_ADD_ONE))


def _wait_while(address: int, value: int) -> None:
    """Wait until the number at that address may be another one, for a while."""
    _libc.syscall(_call, ctypes.c_void_p(address), _WAIT, ctypes.c_int32(value), _while, None, 0)


class _Segment:
    """A memory file, mapped: words that ranks tell each other with, and bytes to read and write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._fit()
        words = memoryview(self._map)
        self.short, self.long = words[:_TABLE].cast("i"), words[:_MARKS].cast("q")
        self.marks = words[_MARKS:_DATA]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _fit(self) -> None:
        """Map the file as long as it is; what was mapped before stays valid."""
        self.size = os.fstat(self.fd).st_size
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        """Make the file so long."""
        os.ftruncate(self.fd, size)
        self._fit()

    def read(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """These bytes as a flat tensor."""
        if start + count > self.size:
            self._fit()
        return self._bytes[start : start + count].view(dtype)

    def entry(self, number: int) -> int:
        """Where the table has that operation: number, place, bytes, kind."""
        return (_TABLE >> 3) + 4 * (number % _SLOTS)

    def row(self, number: int) -> int:
        """Where its marks begin."""
        return _RANKS * (number % _SLOTS)

    def close(self) -> None:
        """The memory goes with the last tensor over it."""
        os.close(self.fd)


class SharedWork:
    """An operation that has begun here; done once it was waited for."""

    def __init__(self, owner: SharedGroup, number: int, kind: tuple[int, int], take: Callable[..., None]) -> None:
        self._owner = owner
        self.number = number
        self.kind = kind
        self.take: Callable[..., None] | None = take
        """Makes the result of what the ranks published, in their order."""
        self.outputs: list[Tensor] = []

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the others' part and take it; `timeout` is a timedelta, without one the group's."""
        if self.take is not None:
            self._owner.finish(self, None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        """True once the result is there; takes it if the others have done their part."""
        if self.take is not None and self._owner.arrived(self.number):
            self.wait()
        return self.take is None

    def is_success(self) -> bool:
        """As torch's Work has it: completed without an error."""
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The result as a future, which is done."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class SharedGroup:
    """The segments of a group's ranks, all on this host."""

    def __init__(self, group: Any, own: _Segment, others: Sequence[tuple[int, str, _Segment]]) -> None:
        """`others` has process and start time of every rank with its segment, this rank's own included."""
        self._group = weakref.ref(group)
        self._rank = td.get_rank(group)
        self._own = own
        self._ranks = others
        self._begun = 0
        self._open: dict[int, SharedWork] = {}
        self._places: list[tuple[int, int, int]] = []  # start, end and number of what others may still read
        self._lock = threading.RLock()

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def reads_all(self) -> bool:
        """Whether it is small enough for each rank to read all that is reduced."""
        return self.size <= _READERS

    def gather(self, output: Tensor, tensor: Tensor) -> SharedWork:
        # By `data`, here and below: a backend's writes are not counted as changes by autograd.
        rows = output.data.view(-1).view(torch.uint8).view(self.size, -1)

        def take(parts: Sequence[Tensor]) -> None:
            for row, part in zip(rows, parts, strict=True):
                row.copy_(part)

        return self._begin(tensor, (0, 0), take, output)

    def scatter(self, output: Tensor, tensor: Tensor, op: Any) -> SharedWork:
        """Reduce-scatter from one tensor."""
        mine, count = output.data.view(-1), output.numel()

        def take(parts: Sequence[Tensor]) -> None:
            at = self._rank * count
            _reduce([part.view(output.dtype)[at : at + count] for part in parts], op, mine)

        return self._begin(tensor, (1 + _OPS.index(op), _DTYPES[tensor.dtype]), take, output)

    def all_reduce(self, tensor: Tensor, op: Any) -> SharedWork:
        """All-reduce in place: each rank reads what all have."""

        def take(parts: Sequence[Tensor]) -> None:
            found, flat = [part.view(tensor.dtype) for part in parts], tensor.data.view(-1)
            if self._rank < 2:  # read before it is written, and nearer than the copy that others read
                found[self._rank] = flat
            _reduce(found, op, flat)

        return self._begin(tensor, (16 + _OPS.index(op), _DTYPES[tensor.dtype]), take, tensor)

    # --- sending -------------------------------------------------------------------------------------------------

    def _begin(self, tensor: Tensor, kind: tuple[int, int], take: Callable[..., None], output: Tensor) -> SharedWork:
        sent = tensor.data.view(-1).view(torch.uint8)
        with self._lock:
            number = self._begun + 1
            if (never := self._open.get(number - _SLOTS)) is not None:
                never.wait()
            start = self._place(number, sent.numel())
            self._own.read(start, sent.numel(), torch.uint8).copy_(sent)
            entry = self._own.entry(number)
            row = self._own.row(number)
            self._own.marks[row : row + self.size] = bytes(self.size)
            self._own.long[entry + 1], self._own.long[entry + 2] = start, sent.numel()
            self._own.long[entry + 3], self._own.long[entry] = kind[0] * 64 + kind[1], number
            self._begun = number
            work = self._open[number] = SharedWork(self, number, kind, take)
            work.outputs.append(output)
            _publish(self._own.address)
        return work

    def _place(self, number: int, size: int) -> int:
        """A free place for so many bytes, at the end of the file where there is none."""
        deadline = time.monotonic() + self._seconds()
        while number > _SLOTS and self._unread(number - _SLOTS):  # the table has no row left
            self._check(deadline, "to read what this rank has sent")
            time.sleep(0.001)
        self._places = [place for place in self._places if self._unread(place[2])]
        length, start = -(-size // _ALIGN) * _ALIGN, _DATA
        for begin, end, _ in self._places:
            if begin - start >= length:
                break
            start = end
        if start + length > self._own.size:
            self._own.grow(max(2 * self._own.size, start + length))
        self._places.append((start, start + length, number))
        self._places.sort()
        return start

    def _unread(self, number: int) -> bool:
        """Whether a rank has not read yet what this one sent."""
        row = self._own.row(number)
        return 0 in self._own.marks[row : row + self.size]

    # --- receiving -----------------------------------------------------------------------------------------------

    def arrived(self, number: int) -> bool:
        """Whether all ranks have published that operation."""
        return all(_behind(segment.short[_PUBLISHED], number) <= 0 for _, _, segment in self._ranks)

    def finish(self, work: SharedWork, seconds: float | None) -> None:
        """Take the result of an operation, waiting for the others' part."""
        deadline = time.monotonic() + (self._seconds() if seconds is None else seconds)
        for place, (_, _, segment) in enumerate(self._ranks):
            while True:
                published = segment.short[_PUBLISHED]
                _wait_while(segment.address, published - 1)  # returns at once; what was published can be read then
                if _behind(published, work.number) <= 0:
                    break
                _wait_while(segment.address, published)
                if _behind(segment.short[_PUBLISHED], work.number) > 0:
                    self._check(deadline, "to begin the operation", place)
        with self._lock:
            take, work.take = work.take, None
            if take is None:
                return  # another thread was first
            parts = [self._part(place, work) for place in range(self.size)]
            with torch.no_grad():
                take(parts)
            del self._open[work.number]
            _wait_while(
                self._own.address, self._own.short[_PUBLISHED] - 1
            )  # what was read was, before the marks say so
            for _, _, segment in self._ranks:
                segment.marks[segment.row(work.number) + self._rank] = 1

    def _part(self, place: int, work: SharedWork) -> Tensor:
        segment, own = self._ranks[place][2], self._own
        at, mine = segment.entry(work.number), own.entry(work.number)
        if list(segment.long[at + 2 : at + 4]) != list(own.long[mine + 2 : mine + 4]):
            raise RuntimeError(
                f"connection closed: rank {place} of the group sends {segment.long[at + 2]} bytes in an operation of "
                f"kind {segment.long[at + 3]}, this rank {own.long[mine + 2]} bytes in one of kind {own.long[mine + 3]}"
            )
        return segment.read(segment.long[at + 1], segment.long[at + 2], torch.uint8)

    # --- what may go wrong ---------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        # Imported late: the watch stands on the operations, which stand on this module.
        from deepspeed.comm.watch.settings import seconds_of

        return seconds_of(self._group())

    def _check(self, deadline: float, what: str, place: int | None = None) -> None:
        """Raise if what is waited for cannot come."""
        for rank in range(self.size) if place is None else (place,):
            pid, started, segment = self._ranks[rank]
            if segment.short[_CLOSED] or has_ended(pid, started):
                how = "has left the group" if segment.short[_CLOSED] else "has ended"
                raise RuntimeError(f"connection closed by peer: rank {rank} of the group, process {pid}, {how}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out while waiting for other ranks {what}, in memory that they share")

    def close(self) -> None:
        """Tell the others that this rank takes part no more."""
        if not self._own.short[_CLOSED]:
            self._own.short[_CLOSED] = 1
            for _, _, segment in self._ranks:
                segment.close()


def _behind(published: int, number: int) -> int:
    """How many operations a count that wraps at 32 bits is behind."""
    return (number - published + (1 << 31)) % (1 << 32) - (1 << 31)


def _reduce(parts: Sequence[Tensor], op: Any, out: Tensor) -> None:
    combine, total = _REDUCE[op], parts[0]
    for part in parts[1:]:
        total = combine(total, part, out=out)


# --- groups --------------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[Any, SharedGroup | None] = weakref.WeakKeyDictionary()


def shared_group(group: Any, tensor: Tensor, size: int, op: Any = None, *, blocks: bool) -> SharedGroup | None:
    """The group's shared memory, if it has some and this message is one for it; all ranks answer alike.

    Worlds and axes have met when they were made; other groups meet in their first call that `blocks`.
    """
    if not tensor.is_cpu or not SMALLEST <= size <= LARGEST:
        return None
    if op is not None and (op not in _REDUCE or tensor.dtype not in _SUMS):
        return None
    return meet(group) if blocks else _known.get(group)


def meet(group: Any) -> SharedGroup | None:
    """The group's shared memory, made where it has none yet; its ranks call this together, and wait for each other."""
    if group in _known:
        return _known[group]
    found = _known[group] = _meet(group)
    if found is not None:
        weakref.finalize(group, found.close).atexit = False
    return found


def forget(group: Any) -> None:
    """The group ends; without one, all of them do."""
    for each in [group] if group is not None else list(_known):
        found = _known.pop(each, None)
        if found is not None:
            found.close()


def _meet(group: Any) -> SharedGroup | None:
    """Map the memory of all ranks of a group; None where a rank cannot. Its ranks call this together."""
    world = td.get_world_size(group)
    if td.get_backend(group) not in ("gloo", "cpu:gloo,cuda:nccl") or not 1 < world <= _RANKS:
        return None
    own, told = None, None
    wanted = os.environ.get("DS_COMM_SHARED_MEMORY", "1").strip().lower() not in ("0", "false", "off", "no")
    if wanted and supported() and _call >= 0 and (state := process_state(os.getpid())) is not None:
        try:
            own = os.memfd_create("deepspeed-collectives")
            os.ftruncate(own, _DATA + (1 << 20))
        except OSError as error:  # no descriptor or memory is left; the others hear of it
            warn_once(f"{world} ranks of this host use gloo's sockets, since this one gets no shared memory: {error}")
        else:
            told = (host_key(), os.getpid(), state[1], own)
    found: list[Any] = [None] * world
    td.all_gather_object(found, told, group)
    hosts = {None if each is None else each[0] for each in found}
    ranks: list[tuple[int, str, _Segment]] = []
    if len(hosts) == 1 and None not in hosts and own is not None:
        ranks = _mapped(found, own, td.get_rank(group))
    done = torch.tensor(len(ranks) == world, dtype=torch.int32)
    td.all_reduce(done, td.ReduceOp.MIN, group)
    if bool(done):
        return SharedGroup(group, ranks[td.get_rank(group)][2], ranks)
    for _, _, segment in ranks:
        segment.close()
    if own is not None and all(segment.fd != own for _, _, segment in ranks):
        os.close(own)
    return None


def _mapped(found: Sequence[Any], own: int, rank: int) -> list[tuple[int, str, _Segment]]:
    """The segments of all ranks; fewer where one cannot be opened."""
    ranks: list[tuple[int, str, _Segment]] = []
    for place, (_, pid, started, fd) in enumerate(found):
        try:
            opened = own if place == rank else os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # not ours to look at
            break
        ranks.append((pid, started, _Segment(opened)))
    return ranks
