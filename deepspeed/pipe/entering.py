"""What comes into a stage: leaves, for which a gradient goes back, and the same values as layers may see them.

A layer may change its input in place, as `nn.ReLU(inplace=True)` does. Of a leaf that needs a gradient autograd does
not allow that; so layers get the result of an operation that does nothing, over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from deepspeed.pipe.forms import map_tensors

__all__ = ["cut_off", "entered"]


_as_new: Callable[[Tensor, torch.Size], Tensor] = torch.ops.aten._unsafe_view.default
"""The same tensor as one of its own: no view, and what happens to it is not counted as a change of what was given."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)  # so that it is no view of what was given, and may be changed
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def entered(value: Any, *, shared: bool) -> tuple[Any, list[Tensor]]:
    """(the structure for layers, its leaves that need a gradient, each once).

    Of memory that is `shared` with the stage before, on one rank, autograd must know what changes: that stage may need
    it in its backward. What another rank sent is nobody else's.
    """
    leaves: list[Tensor] = []

    def enter(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor)
        if not shared:
            return _as_new(tensor, tensor.shape)
        value = tensor.detach()
        with _unsafe_preserve_version_counter(value):  # nothing was changed yet
            entering: Tensor = _Enter.apply(tensor, value)  # type: ignore[no-untyped-call]
        return entering

    return (enter(value) if isinstance(value, Tensor) else map_tensors(value, _once(enter))), leaves


def cut_off(value: Any) -> Any:
    """The same structure without what it comes from; its tensors get gradients of their own if they need some."""
    return map_tensors(value, _once(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)))


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A tensor that is at two places of a structure stays one tensor."""
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return changed
