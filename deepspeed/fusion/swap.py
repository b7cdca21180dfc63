"""`Swap`: another way to compute what a module computes, put in place and taken back."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TOKENS", "Refused", "Swap", "Undo", "put_forward", "put_whole", "replacement", "whole_shape"]

Undo = Callable[[], None]

_PUT = "deepspeed_put"

TOKENS = 4096
"""Of a rehearsal: any number of them that is a multiple of 16 has the same kernels."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A module that looks as if it could be replaced, and why it is not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Swap:
    """What replaces a module's computation, and how to put it in place; `put` returns how to take it back."""

    kernel: str
    put: Callable[[], Undo]
    scene: Callable[..., None] | None = None
    """What is computed, in a `dtype` and without memory; see [Note: rehearsals]. None: nothing to rehearse."""


def whole_shape(param: Tensor) -> torch.Size:
    """The shape of a parameter, also of one that is sharded now."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def put_forward(module: nn.Module, forward: Callable[..., Any], *, compiled: Callable[..., Any] | None = None) -> Undo:
    """Let this one module compute `forward(module, ...)`; its class and all others of it stay as they are.

    A compiler gets to see `compiled`, by default what the class computes, which it fuses by itself.
    """
    before, seen = module.__dict__.get("forward"), compiled or type(module).forward

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (seen if torch.compiler.is_compiling() else forward)(self, *args, **kwargs)

    run.__name__ = "forward"  # by which it is pickled: what is loaded computes what its class does
    run.__dict__[_PUT] = forward

    module.forward = types.MethodType(run, module)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return undo


def put_whole(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """As `put_forward`, for modules of which others read what they take: their signature stays."""
    undo = put_forward(module, forward)
    module.forward.__func__.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
    return undo


def replacement(module: nn.Module) -> Callable[..., Any] | None:
    """What `put_forward` let a module compute; None where nothing did."""
    found: Callable[..., Any] | None = getattr(module.__dict__.get("forward"), _PUT, None)
    return found
