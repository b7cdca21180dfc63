"""`Swap`: another way to compute what a module computes, put in place and taken back."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from deepspeed.parallel.regions import cut_of

Undo = Callable[[], None]
Serves = Literal["train", "infer", "both"]
"""What a replacement is for: passes with a backward, passes without, or both."""

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
    serves: Serves = "both"


def whole_shape(param: Any) -> tuple[int, ...]:
    """The shape of a parameter, also of one that is sharded now."""
    return tuple(getattr(param, "ds_shape", param.shape))


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


def put_whole(module: nn.Module, forward: Callable[..., Any], *, compiled: Callable[..., Any] | None = None) -> Undo:
    """As `put_forward`, for modules of which others read what they take: their signature stays."""
    undo = put_forward(module, forward, compiled=compiled)
    module.forward.__func__.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
    return undo


def put_product(layer: nn.Module, product: Callable[..., Any]) -> Undo:
    """`put_forward`; of a layer that ranks share, only its `product`: what goes over the wire stays as it is."""
    if cut_of(layer) is None:
        return put_forward(layer, product)
    return put_attribute(layer, "product", types.MethodType(product, layer))


def own_product(layer: nn.Module) -> Callable[..., Any]:
    """What `put_product` takes the place of, as the layer's class has it."""
    kind: Any = type(layer)
    found: Callable[..., Any] = kind.forward if cut_of(layer) is None else kind.product
    return found


def replacement(module: nn.Module) -> Callable[..., Any] | None:
    """What `put_forward` let a module compute; None where nothing did."""
    found: Callable[..., Any] | None = getattr(module.__dict__.get("forward"), _PUT, None)
    return found


def put_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Let an object have another attribute of its own; returns how to take it back."""
    before = vars(owner).get(name)

    def undo() -> None:
        if before is None:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    return undo


def class_before(kind: type[nn.Module], original: type[nn.Module], prefix: str = "") -> type[nn.Module]:
    """A module's own class with `kind` before it: the module keeps its object, its hooks and its parameters."""
    return _made(kind, original, prefix or kind.__name__)  # type: ignore[arg-type]  # mypy takes no class of torch's for hashable


@functools.cache
def _made(kind: Any, original: Any, prefix: str) -> type[nn.Module]:
    return type(f"{prefix}{original.__name__}", (kind, original), {"__module__": kind.__module__})
