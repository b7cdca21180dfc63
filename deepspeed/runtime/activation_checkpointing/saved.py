"""A saved tensor until backward: the tensor itself, noticed if it changes, or its values in a row and the way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.runtime.activation_checkpointing.structure import CheckpointingError

__all__ = ["AsIs", "Form", "changed_in_place", "flattened", "is_expanded"]


def changed_in_place(shape: torch.Size, found: int, given: int) -> CheckpointingError:
    """The error for values that are not those that were saved; torch looks for it only where no hook is open."""
    return CheckpointingError(
        f"a tensor that backward needs, of shape {list(shape)}, is at version {found} but was given at version "
        f"{given}: it was changed in place before backward. Clone it before changing it."
    )


@dataclass(frozen=True, slots=True)
class AsIs:
    """A tensor that stays where it is."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AsIs:
        """The tensor, as it is now."""
        return cls(tensor, tensor._version)

    def get(self) -> torch.Tensor:
        """The tensor, if it did not change."""
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


@dataclass(frozen=True, slots=True)
class Form:
    """How a row of elements becomes a tensor of the same strides."""

    shape: torch.Size  # with the dims in `order`
    order: tuple[int, ...]  # dims from the slowest to the fastest

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of `flat`."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.shape).permute(back)


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, Form]:
    """Elements in the order of memory, a view where they lie without gaps, else a copy; and their form."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    ordered = tensor.detach().permute(order)
    return ordered.reshape(-1), Form(ordered.shape, order)


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if elements share memory, so that a copy of each would take more of it."""
    return any(step == 0 < size - 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
