"""Saved tensors that wait in host memory: they leave while forward goes on and come back before backward needs them.

[Note: turns]
Backward uses what forward saved in the opposite order. What one checkpointed call saves is a turn; each turn knows the
one before it. When backward asks for a tensor of a turn, the rest of that turn and all of the turn before begin to
come back, so that they travel while this turn is computed. Turns and what waits belong to autograd's graph alone:
dropping the graph drops them, and their host buffers are free again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.memory.streaming import CopyStream, PendingCopy, copy_stream_for


class CheckpointingError(DeepSpeedError, RuntimeError):
    """A checkpointed call whose inputs cannot be kept, or cannot be given back."""


def changed_in_place(shape: torch.Size, found: int, given: int) -> CheckpointingError:
    """The error for values that are not those that were saved; torch looks for it only where no hook is open."""
    return CheckpointingError(
        f"a tensor that backward needs, of shape {list(shape)}, is at version {found} but was given at version "
        f"{given}: it was changed in place before backward. Clone it before changing it."
    )


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that stays where it is."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        """The tensor, as it is now."""
        return cls(tensor, tensor._version)

    def get(self) -> torch.Tensor:
        """The tensor, if it did not change."""
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


@dataclass(frozen=True, slots=True)
class StridedForm:
    """How a row of elements becomes a tensor of the same strides."""

    shape: torch.Size  # with the dims in `order`
    order: tuple[int, ...]  # dims from the slowest to the fastest

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of `flat`."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.shape).permute(back)


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, StridedForm]:
    """Elements in the order of memory, a view where they lie without gaps, else a copy; and their form."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    ordered = tensor.detach().permute(order)
    return ordered.reshape(-1), StridedForm(ordered.shape, order)


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if elements share memory, so that a copy of each would take more of it."""
    return any(step == 0 < size - 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


_ALIGNMENT = 128  # elements, so that every slot starts where vector loads and copies want it
Place = TypeVar("Place")
MakeBuffer = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class BufferSlot(Generic[Place]):
    """A part of a buffer that is taken until this object is gone, which is when autograd lets go of the input."""

    __slots__ = ("_give_back", "_place", "tensor")

    def __init__(self, tensor: torch.Tensor, place: Place, give_back: Callable[[Place], object]) -> None:
        self.tensor = tensor  # [numel]
        self._place = place
        self._give_back = give_back

    def __del__(self) -> None:
        # Whichever thread or collector runs this: what takes places back is atomic and takes no lock.
        self._give_back(self._place)


class _Buffer:
    """Slots of equal size."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data  # [slots, slot_numel]
        self.free = list(range(len(data) - 1, -1, -1))

    @property
    def taken(self) -> int:
        return len(self.data) - len(self.free)

    @property
    def slot_numel(self) -> int:
        return self.data.shape[1]

    def take(self, numel: int) -> BufferSlot[int]:
        index = self.free.pop()
        return BufferSlot(self.data[index, :numel], index, self.free.append)


class CheckpointBuffers:
    """Buffers with room for `capacity` calls each; larger inputs than before get a larger buffer."""

    def __init__(self, capacity: int, make: MakeBuffer) -> None:
        self._capacity = capacity
        self._make = make
        self._buffers: dict[tuple[int, torch.dtype, torch.device], list[_Buffer]] = {}

    def take(self, position: int, numel: int, dtype: torch.dtype, device: torch.device) -> BufferSlot[int]:
        """Room for `numel` elements of the tensor at this position among a call's arguments."""
        key = (position, dtype, device)
        # Buffers that became too small live as long as their slots; only the last one gives out new slots.
        buffers = [buffer for buffer in self._buffers.get(key, []) if buffer.taken or buffer.slot_numel >= numel]
        if sum(buffer.taken for buffer in buffers) >= self._capacity:
            raise DeepSpeedConfigError(
                f"activation_checkpointing.number_checkpoints (argument num_checkpoints of configure): the inputs of "
                f"{self._capacity} checkpointed calls are kept already, and another call came before their backward. "
                "Set it to the number of checkpointed calls whose backward is outstanding at once: those of one "
                "forward pass, times the forward passes before a backward, and nested ones.",
                path="activation_checkpointing.number_checkpoints",
            )
        if not buffers or buffers[-1].slot_numel < numel:
            padded = -(-numel // _ALIGNMENT) * _ALIGNMENT
            buffers.append(_Buffer(self._make(self._capacity * padded, dtype, device).view(-1, padded)))
        self._buffers[key] = buffers
        return buffers[-1].take(numel)

    @property
    def buffer_elements(self) -> int:
        return sum(buffer.data.numel() for buffers in self._buffers.values() for buffer in buffers)


_SMALLEST = 512


def size_class(nbytes: int) -> int:
    """The bytes of the buffer for so many: at most an eighth more, so that tensors of about one size share buffers."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class HostPool:
    """Gives out buffers and keeps up to `limit` that are unused; None: as many as were ever used at once."""

    def __init__(self, limit: int | None, make: Callable[[int], torch.Tensor]) -> None:
        self._limit = limit
        self._make = make
        self._free: dict[int, list[torch.Tensor]] = {}  # by size, the size that was used last at the end
        self._sorted = 0  # buffers in `_free`
        self._returned: deque[torch.Tensor] = deque()  # by slots, from any thread, until the next call comes along
        self.in_use = 0
        """Buffers that are given out."""
        self._most_in_use = 0

    @property
    def unused(self) -> int:
        """Buffers that wait to be used again."""
        return len(self._returned) + self._sorted

    def take(self, numel: int, dtype: torch.dtype) -> BufferSlot[torch.Tensor]:
        """Room for `numel` elements, until the slot is gone."""
        self._sort_returned()
        nbytes = numel * dtype.itemsize
        size = size_class(nbytes)
        of_size = self._free.pop(size, [])
        if of_size:
            buffer = of_size.pop()
            self._sorted -= 1
        else:
            self._drop_oldest()
            buffer = self._make(size)
        self._free[size] = of_size
        self.in_use += 1
        self._most_in_use = max(self._most_in_use, self.in_use)
        return BufferSlot(buffer[:nbytes].view(dtype), buffer, self._take_back)

    def clear(self) -> None:
        """Let go of every unused buffer."""
        self._returned.clear()
        self._free.clear()
        self._sorted = 0

    def _take_back(self, buffer: torch.Tensor) -> None:
        self.in_use -= 1
        if self.unused < (self._most_in_use if self._limit is None else self._limit):
            self._returned.append(buffer)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._sorted += 1

    def _drop_oldest(self) -> None:
        """One unused buffer goes for each new one: sizes that are not asked for any more do not stay for ever."""
        for size in list(self._free):
            if self._free[size]:
                self._free[size].pop()
                self._sorted -= 1
                return
            del self._free[size]


@dataclass(slots=True)
class CheckpointActivationOffloadStats:
    """What happened to saved tensors."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class _Where(Enum):
    HERE = "on the device, among the last"
    LEAVING = "on the device, copied to the host"
    AWAY = "in host memory"
    COMING = "copied to the device"


class CallGroup:
    """The tensors that one call saves."""

    __slots__ = ("__weakref__", "before", "members")

    def __init__(self) -> None:
        self.members: list[weakref.ref[OffloadedTensor]] = []
        self.before: weakref.ref[CallGroup] | None = None

    def parked(self) -> list[OffloadedTensor]:
        """Those that still wait."""
        return [parked for ref in self.members if (parked := ref()) is not None]


class OffloadedTensor:
    """A 1-D tensor that waits for backward; only `ActivationOffload` looks inside."""

    __slots__ = (
        *("__weakref__", "device", "dtype", "numel", "shape", "turn", "version"),
        *("found", "given_back", "slot", "tensor", "ticket", "where"),
    )

    def __init__(self, flat: torch.Tensor, shape: torch.Size, turn: CallGroup, slot: BufferSlot[int] | None) -> None:
        self.numel, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.shape = shape  # of the saved tensor, for messages
        self.turn = turn
        self.version = self.found = flat._version  # of the saved tensor if `flat` is a view of it
        self.tensor: torch.Tensor | None = flat
        self.slot: BufferSlot[int] | BufferSlot[torch.Tensor] | None = slot
        self.where = _Where.HERE
        self.ticket: PendingCopy | None = None
        self.given_back = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def look(self) -> None:
        """Notice a change in place of what is still on the device."""
        if self.tensor is not None and self.where is not _Where.COMING:
            self.found = self.tensor._version

    def check(self) -> None:
        """Raise if the values are not those that were given."""
        self.look()
        if self.found != self.version:
            raise changed_in_place(self.shape, self.found, self.version)


class ActivationOffload:
    """Takes tensors to the host and back, within limits; one for all calls that share them.

    `stash` tensors may stay on the device while they are copied; the next one makes forward wait for the oldest. The
    newest `keep_last` do not leave, since backward begins with them. `pool` is the limit of a `HostPool`.
    """

    def __init__(
        self,
        *,
        stash: int = 2,
        pool: int | None = None,
        keep_last: int = 1,
        pinned: bool = True,
        copy_stream: Callable[[torch.device], CopyStream] = copy_stream_for,
    ) -> None:
        self._stash = stash
        self._keep_last = keep_last
        self._pinned = pinned
        self._make_stream = copy_stream
        self._streams: dict[torch.device, CopyStream] = {}
        self._last_turn: weakref.ref[CallGroup] | None = None
        self._newest: deque[weakref.ref[OffloadedTensor]] = deque()
        self._leaving: deque[weakref.ref[OffloadedTensor]] = deque()
        # Held until the copy is done, also if they are not wanted any more: it would write into memory of others.
        self._coming: list[tuple[PendingCopy, torch.Tensor]] = []
        self.pool = HostPool(pool, self._host_buffer)
        self.stats = CheckpointActivationOffloadStats()

    @property
    def on_device(self) -> int:
        """Tensors of forward whose device memory is held: among the last, or leaving."""
        waiting = [ref() for ref in (*self._newest, *self._leaving)]
        return sum(parked is not None and parked.tensor is not None for parked in waiting)

    def park(
        self, flat: torch.Tensor, shape: torch.Size, turn: CallGroup, slot: BufferSlot[int] | None = None
    ) -> OffloadedTensor:
        """What waits for a tensor of this shape, in `slot` if it is given; it leaves once newer ones have come."""
        if not turn.members:
            turn.before, self._last_turn = self._last_turn, weakref.ref(turn)
        parked = OffloadedTensor(flat, shape, turn, slot)
        turn.members.append(weakref.ref(parked))
        self._newest.append(weakref.ref(parked))
        while len(self._newest) > self._keep_last:
            oldest = self._newest.popleft()()
            if oldest is not None:
                self._send(oldest)
        self._let_go(self._stash)
        return parked

    def give_back(self, parked: OffloadedTensor) -> torch.Tensor:
        """The values on their device; a second time they are brought only when they are asked for."""
        parked.check()
        here = parked.where in (_Where.HERE, _Where.LEAVING)
        self._fetch(parked)
        for each in (*parked.turn.parked(), *self._before(parked.turn)):
            if not each.given_back:
                self._fetch(each)
        self._coming = [(ticket, tensor) for ticket, tensor in self._coming if not ticket.done()]
        tensor = parked.tensor
        assert tensor is not None, "a tensor that is here or coming"
        if parked.where is _Where.HERE:
            self.stats.kept_last_tensors += 1
        else:
            self.stats.restored_tensors += 1
            self.stats.restored_bytes += parked.nbytes
        parked.given_back = True
        if not here:
            assert parked.ticket is not None, "a tensor that is coming"
            parked.ticket.join()
            self._coming = [(ticket, held) for ticket, held in self._coming if held is not tensor]
            parked.tensor, parked.ticket, parked.where = None, None, _Where.AWAY
        return tensor

    def drain(self) -> None:
        """Wait for all copies and let go of what only they needed; what waits goes on waiting."""
        for stream in self._streams.values():
            stream.synchronize()
        self._let_go(0)
        self._coming.clear()
        self.pool.clear()

    def _before(self, turn: CallGroup) -> list[OffloadedTensor]:
        before = None if turn.before is None else turn.before()
        return [] if before is None else before.parked()

    def _send(self, parked: OffloadedTensor) -> None:
        """Begin the copy to the host."""
        parked.look()
        if parked.tensor is None or parked.found != parked.version:
            parked.tensor = None  # changed already: there is nothing left to copy, and backward raises an error
            return
        if parked.slot is None:
            parked.slot = self.pool.take(parked.numel, parked.dtype)
        parked.ticket = self._stream(parked.device).copy(parked.slot.tensor, parked.tensor)
        parked.where = _Where.LEAVING
        self._leaving.append(weakref.ref(parked))
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += parked.nbytes

    def _let_go(self, most: int) -> None:
        """Free the device memory of what has left; what computes waits for the oldest beyond `most`."""
        leaving = deque(ref for ref in self._leaving if (parked := ref()) is not None and parked.tensor is not None)
        while leaving:
            parked = leaving[0]()
            assert parked is not None, "looked at above"
            assert parked.ticket is not None, "a tensor on its way"
            if len(leaving) > most:
                parked.ticket.join()
            elif not parked.ticket.done():
                break
            parked.look()  # what changed before this moment may have been copied half
            parked.tensor, parked.ticket, parked.where = None, None, _Where.AWAY
            leaving.popleft()
        self._leaving = leaving

    def _fetch(self, parked: OffloadedTensor) -> None:
        """Begin the copy to the device, unless it is there or has begun."""
        if parked.where is not _Where.AWAY or parked.slot is None:
            return
        # Allocated, and later freed, in the order of the stream that computes.
        parked.tensor = torch.empty(parked.numel, dtype=parked.dtype, device=parked.device)
        parked.ticket = self._stream(parked.device).copy(parked.tensor, parked.slot.tensor)
        parked.where = _Where.COMING
        self._coming.append((parked.ticket, parked.tensor))

    def _stream(self, device: torch.device) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = self._make_stream(device)
        return self._streams[device]

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        make = get_accelerator().pin_empty if self._pinned else torch.empty
        return make(nbytes, dtype=torch.uint8)
