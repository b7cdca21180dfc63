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
from deepspeed.runtime.activation_checkpointing.arena import Arena, Slot
from deepspeed.runtime.activation_checkpointing.axis import ModelAxis
from deepspeed.runtime.activation_checkpointing.settings import Settings
from deepspeed.runtime.activation_checkpointing.structure import CheckpointingError

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
        and not any(step == 0 < size - 1 for step, size in zip(value.stride(), value.shape, strict=True))  # expanded
    )


def shard_numel(numel: int, ranks: int) -> int:
    """Elements of each rank's shard; the last shards are padded where `ranks` does not divide."""
    return -(-numel // ranks)


@dataclass(frozen=True, slots=True)
class _AsIs:
    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    flat: torch.Tensor  # [numel], or [shard_numel] of it
    slot: Slot | None
    device: torch.device
    shape: torch.Size  # with the dims in `order`
    order: tuple[int, ...]  # dims from the slowest to the fastest, so that strides come back too


class Keeper:
    """Keeps inputs as the settings say. All ranks of the axis must be given the same values, as they compute them."""

    def __init__(self, settings: Settings, axis: ModelAxis) -> None:
        self._axis = axis
        self._shards = axis.size if settings.partition_activations else 1
        # Where the accelerator is the CPU, inputs are in host memory already.
        self._to_host = settings.cpu_checkpointing and get_accelerator().device_name() != "cpu"
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
        positions = itertools.count()
        return saved_tensors_hooks(lambda tensor: self.keep(next(positions), tensor), self.give_back)

    def keep(self, position: int, tensor: torch.Tensor) -> _AsIs | _Waiting:
        """What waits for backward instead of the tensor at this position among a call's tensors."""
        moves = self._to_host and tensor.device != _HOST
        if not is_activation(tensor) or not (self._shards > 1 or moves or self.arena is not None):
            return _AsIs(tensor, tensor._version)
        with torch.no_grad():
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
            ordered = tensor.detach().permute(order)
            size = shard_numel(tensor.numel(), self._shards)
            start = size * self._axis.rank if self._shards > 1 else 0
            part = ordered.reshape(-1)[start : start + size]
            part = pad(part, (0, size - part.numel())) if part.numel() < size else part
            home = _HOST if moves else tensor.device
            slot = None if self.arena is None else self.arena.take(position, size, tensor.dtype, home)
            flat = self._empty(size, tensor.dtype, home) if slot is None else slot.tensor
            flat.copy_(part, non_blocking=True)  # ordered by the current stream, as is all that touches `flat`
        return _Waiting(flat, slot, tensor.device, ordered.shape, order)

    def give_back(self, kept: _AsIs | _Waiting) -> torch.Tensor:
        """The tensor that `keep` was given, by value."""
        if isinstance(kept, _AsIs):
            if kept.tensor._version != kept.version:
                raise CheckpointingError(
                    f"an input of a checkpointed call, of shape {list(kept.tensor.shape)}, is at version "
                    f"{kept.tensor._version} but was given at version {kept.version}: it was changed in place before "
                    "backward. Clone it before changing it."
                )
            return kept.tensor
        with torch.no_grad():
            flat = kept.flat
            if flat.device != kept.device:
                flat = flat.to(kept.device, non_blocking=True)
            elif self._shards == 1:
                flat = flat.clone()  # the slot may be taken by the next step while this tensor is still in use
            if self._shards > 1:
                whole = torch.empty(self._shards * flat.numel(), dtype=flat.dtype, device=flat.device)
                with comm.labelled("a saved input of a checkpointed call"):
                    comm.all_gather_into_tensor(whole, flat, group=self._axis.group)
                flat = whole[: kept.shape.numel()]
            back = [kept.order.index(dim) for dim in range(len(kept.order))]
            return flat.view(kept.shape).permute(back)

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device == _HOST and self._to_host:
            return get_accelerator().pin_empty(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype, device=device)
