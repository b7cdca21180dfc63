"""One buffer per argument position for the saved inputs of all checkpointed calls, used again in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from deepspeed.errors import DeepSpeedConfigError

__all__ = ["Arena", "Slot"]

_ALIGNMENT = 128  # elements, so that every slot starts where vector loads and copies want it
Place = TypeVar("Place")
MakeBuffer = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Slot(Generic[Place]):
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
    """`count` slots of equal size."""

    __slots__ = ("_count", "_data", "free", "slot_numel")

    def __init__(self, data: torch.Tensor, count: int) -> None:
        self._data = data.view(count, -1)  # [count, slot_numel]
        self._count = count
        self.slot_numel = self._data.shape[1]
        self.free = list(range(count - 1, -1, -1))

    @property
    def taken(self) -> int:
        return self._count - len(self.free)

    def take(self, numel: int) -> Slot[int]:
        index = self.free.pop()
        return Slot(self._data[index, :numel], index, self.free.append)


class Arena:
    """Buffers with room for `capacity` calls each; larger inputs than before get a larger buffer."""

    def __init__(self, capacity: int, make: MakeBuffer) -> None:
        self._capacity = capacity
        self._make = make
        self._buffers: dict[tuple[int, torch.dtype, torch.device], list[_Buffer]] = {}

    def take(self, position: int, numel: int, dtype: torch.dtype, device: torch.device) -> Slot[int]:
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
            buffers.append(_Buffer(self._make(self._capacity * padded, dtype, device), self._capacity))
        self._buffers[key] = buffers
        return buffers[-1].take(numel)

    @property
    def buffer_elements(self) -> int:
        """Elements in all buffers."""
        return sum(b.slot_numel * self._capacity for buffers in self._buffers.values() for b in buffers)
