"""What travels between stages: nested tuples, lists and dicts of tensors and plain values, and their form as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import PipelineError

__all__ = ["Form", "Kind", "flatten", "map_tensors", "unflatten"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Kind:
    """One tensor: its dtype, its shape, and whether a gradient comes back for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Structure = tuple[str, Any]
"""("tensor", its number), ("plain", type and value), ("tuple" or "list", parts) or ("dict", pairs of name and part)."""

_LONE: Structure = ("tensor", 0)


@dataclass(frozen=True)
class Form:
    """A structure without its tensors; equal forms need not be told again."""

    structure: Structure
    kinds: tuple[Kind, ...]

    @cached_property
    def trained(self) -> tuple[Kind, ...]:
        """The tensors for which a gradient comes back."""
        return tuple(kind for kind in self.kinds if kind.trained)

    @cached_property
    def lone(self) -> bool:
        """Whether it is that of a tensor by itself, as most stages give."""
        return self.structure == _LONE

    def is_of(self, value: Any) -> bool:
        """Whether it is the form of a lone tensor; True saves `flatten`."""
        if not self.lone or not isinstance(value, Tensor):
            return False
        kind = self.kinds[0]
        return kind.dtype is value.dtype and kind.shape == value.shape and kind.trained == value.requires_grad

    def text(self) -> str:
        """All of it as text, for the stage that receives."""
        kinds = [(str(kind.dtype).removeprefix("torch."), kind.shape, kind.trained) for kind in self.kinds]
        return json.dumps([self.structure, kinds])

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form that `text()` wrote."""
        structure, kinds = json.loads(text)
        known = tuple(Kind(getattr(torch, name), tuple(shape), bool(trained)) for name, shape, trained in kinds)
        return cls(_frozen(structure), known)

    def __str__(self) -> str:
        return ", ".join(map(str, self.kinds)) or "no tensors"


def flatten(value: Any) -> tuple[Form, list[Tensor]]:
    """A structure as its form and its tensors; a tensor that is in it twice is one tensor."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def walk(part: Any) -> Structure:
        if isinstance(part, Tensor):
            if id(part) not in places:
                places[id(part)] = len(tensors)
                tensors.append(part)
            return "tensor", places[id(part)]
        if isinstance(part, (tuple, list)):
            return "tuple" if isinstance(part, tuple) else "list", tuple(walk(each) for each in part)
        if isinstance(part, dict) and all(isinstance(name, str) for name in part):
            return "dict", tuple((name, walk(each)) for name, each in part.items())
        if isinstance(part, _PLAIN):
            return "plain", (type(part).__name__, part)  # 1 and True are equal, but not the same
        raise PipelineError(
            f"a stage gave a {type(part).__name__} to the next one; stages pass tensors, numbers, strings and None, in "
            "tuples, lists and dicts with names"
        )

    structure = walk(value)
    kinds = tuple(Kind(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)
    return Form(structure, kinds), tensors


def unflatten(form: Form, tensors: Sequence[Tensor]) -> Any:
    """The structure again."""

    def walk(part: Structure) -> Any:
        kind, inner = part
        if kind == "tensor":
            return tensors[inner]
        if kind == "dict":
            return {name: walk(each) for name, each in inner}
        if kind == "plain":
            return inner[1]
        parts = [walk(each) for each in inner]
        return tuple(parts) if kind == "tuple" else parts

    return walk(form.structure)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(each, change) for each in value)
    if isinstance(value, dict):
        return {name: map_tensors(each, change) for name, each in value.items()}
    return value
