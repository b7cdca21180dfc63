"""Inputs that are computed again in the backward instead of being kept: those that cost one pass over what is kept.

A normalisation's result is one: the backward of the layers that read it needs it, and it follows from what the
normalisation keeps for its own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError

Compute = Callable[[], Tensor]

_NAME = "_deepspeed_again"


@dataclass(frozen=True, slots=True)
class _Source:
    """How a tensor can be computed again, as it was at this version."""

    compute: Compute
    version: int


class _Again:
    """A tensor that is computed again once for all whose backward needs it: kept from the first to the last of them."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._value: Tensor | None = None
        self._uses = self._left = 0

    def used(self, shape: torch.Size) -> tuple[_Again, torch.Size]:
        """What stands in a graph for it, in this shape."""
        self._uses = self._left = self._uses + 1
        return self, shape

    def value(self, shape: torch.Size) -> Tensor:
        """The tensor, for one of its users."""
        found = self._compute() if self._value is None else self._value
        self._left -= 1
        self._value = found if self._left else None
        self._left = self._left or self._uses  # a graph may be gone through again
        return found.view(shape)


@dataclass(frozen=True, slots=True)
class _Weight:
    """What stands in a graph for a view of a parameter that may be empty by then, and come back before it is used."""

    param: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    version: int

    def view(self) -> Tensor:
        if self.param._version != self.version:
            raise UsageError(
                f"a parameter of shape {tuple(self.param.shape)} was changed in place after the forward that used it "
                f"(version {self.param._version} instead of {self.version}), and the backward of that forward needs "
                "it. Run the backward first."
            )
        whole = self.param.detach()
        return whole.as_strided(self.size, self.stride, whole.storage_offset())


def recomputable(result: Tensor, compute: Compute) -> Tensor:
    """`result`, of which `compute` gives the same numbers once more."""
    if result.requires_grad:
        setattr(result, _NAME, _Source(compute, result._version))
    return result


@contextmanager
def recomputed_input(x: Any, module: nn.Module) -> Iterator[None]:
    """What `module` computes inside does not keep `x` for its backward, if it can be computed again.

    Where something else decides what is kept, as activation checkpointing does, it goes on to decide.
    """
    source: _Source | None = getattr(x, _NAME, None)
    if source is None or not torch.is_grad_enabled() or _somebody_decides():
        yield
        return
    again, place, numel = _Again(source.compute), x.data_ptr(), x.numel()
    params = {param.data_ptr(): param for param in module.parameters() if param.numel()}

    def pack(kept: Tensor) -> Any:
        # of another version it is something else: it was changed in place since it was computed
        if (kept.data_ptr(), kept.numel(), kept._version) == (place, numel, source.version) and kept.is_contiguous():
            return again.used(kept.shape)
        param = params.get(kept.data_ptr())
        return kept if param is None else _Weight(param, kept.shape, kept.stride(), param._version)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, tuple):
            return again.value(kept[1])
        result: Tensor = kept.view() if isinstance(kept, _Weight) else kept
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _somebody_decides() -> bool:
    return torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
