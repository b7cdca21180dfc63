"""How the inputs of a checkpointed call wait for backward: sharded, in host memory, in one buffer, or as they are.

[Note: saved inputs]
torch.utils.checkpoint saves a call's input tensors through autograd, reentrant or not. A pair of saved-tensor hooks
around it therefore sees exactly those tensors, in the order of the arguments: `keep` turns each into what waits, and
`give_back` into a tensor of the same values, shape and strides when the call is about to be run again. Hooks that are
opened inside (torch's own, of the non-reentrant variant, and ours in `call.py`) hide this pair from the call's body.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.memory.lane import on_device
from deepspeed.runtime.activation_checkpointing.arena import Arena, Slot
from deepspeed.runtime.activation_checkpointing.axis import ModelAxis
from deepspeed.runtime.activation_checkpointing.offload import Offload, OffloadLimits, Parked, Turn
from deepspeed.runtime.activation_checkpointing.saved import AsIs, Form, flattened, is_expanded
from deepspeed.runtime.activation_checkpointing.settings import Settings

__all__ = ["SMALLEST", "Keeper", "is_activation", "shard_numel"]

SMALLEST = 1024
"""Elements under which a tensor stays as it is: a collective or a copy would cost more than it saves."""

_HOST = torch.device("cpu")


def is_activation(value: object) -> bool:
    """True for what is worth more than keeping it as it is: a plain floating-point tensor of some size."""
    return (
        type(value) is torch.Tensor  # parameters live anyway; other subclasses have memory of their own kind
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.numel() >= SMALLEST
        and not is_expanded(value)
    )


def shard_numel(numel: int, ranks: int) -> int:
    """Elements of each rank's shard; the last shards are padded where `ranks` does not divide."""
    return -(-numel // ranks)


@dataclass(frozen=True, slots=True)
class _Waiting:
    flat: torch.Tensor | Parked  # [numel], or [shard_numel] of it
    slot: Slot[int] | None
    form: Form


class Keeper:
    """Keeps inputs as the settings say. All ranks of the axis must be given the same values, as they compute them."""

    def __init__(self, settings: Settings, axis: ModelAxis) -> None:
        self._axis = axis
        self._shards = axis.size if settings.partition_activations else 1
        # Where the accelerator is the CPU, inputs are in host memory already.
        self._to_host = settings.cpu_checkpointing and get_accelerator().device_name() != "cpu"
        self._offload = Offload(OffloadLimits(keep_last=settings.keep_last_count))
        self.arena: Arena | None = None
        if settings.contiguous_memory_optimization and settings.number_checkpoints:
            self.arena = Arena(settings.number_checkpoints, self._empty)

    @property
    def active(self) -> bool:
        """False if all inputs stay as they are."""
        return self._shards > 1 or self._to_host or self.arena is not None

    def hooks(self) -> AbstractContextManager[None]:
        """The context for one checkpointed call; see [Note: saved inputs]."""
        if not self.active:
            return nullcontext()
        positions, turn = itertools.count(), Turn()
        return saved_tensors_hooks(lambda tensor: self.keep(next(positions), tensor, turn), self.give_back)

    def keep(self, position: int, tensor: torch.Tensor, turn: Turn) -> AsIs | _Waiting:
        """What waits for backward instead of the tensor at this position among the tensors of a call."""
        moves = self._to_host and on_device(tensor)
        if not is_activation(tensor) or not (self._shards > 1 or moves or self.arena is not None):
            return AsIs.of(tensor)
        with torch.no_grad():
            flat, form = flattened(tensor)
            size = shard_numel(tensor.numel(), self._shards)
            start = size * self._axis.rank if self._shards > 1 else 0
            part = flat[start : start + size]
            part = pad(part, (0, size - part.numel())) if part.numel() < size else part
            home = _HOST if moves else tensor.device
            slot = None if self.arena is None else self.arena.take(position, size, tensor.dtype, home)
            if moves:
                return _Waiting(self._offload.park(part, tensor.shape, turn, slot), slot, form)
            kept = self._empty(size, tensor.dtype, home) if slot is None else slot.tensor
            kept.copy_(part)
        return _Waiting(kept, slot, form)

    def give_back(self, kept: AsIs | _Waiting) -> torch.Tensor:
        """The tensor that `keep` was given, by value."""
        if isinstance(kept, AsIs):
            return kept.get()
        with torch.no_grad():
            flat = self._offload.give_back(kept.flat) if isinstance(kept.flat, Parked) else kept.flat
            if flat is kept.flat and self._shards == 1:
                flat = flat.clone()  # the slot may be taken by the next step while this tensor is still in use
            if self._shards > 1:
                whole = torch.empty(self._shards * flat.numel(), dtype=flat.dtype, device=flat.device)
                with comm.labelled("a saved input of a checkpointed call"):
                    comm.all_gather_into_tensor(whole, flat, group=self._axis.group)
                flat = whole[: kept.form.shape.numel()]
            return kept.form.restore(flat)

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device == _HOST and self._to_host:
            return get_accelerator().pin_empty(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype, device=device)
