"""Arguments and results taken apart into their tensors and the rest, and put together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import DeepSpeedError

__all__ = ["CheckpointingError", "detach_variable", "extract_tensors", "merge_tensors", "rebuild", "take_apart"]


class CheckpointingError(DeepSpeedError, RuntimeError):
    """A checkpointed call whose inputs cannot be kept, or cannot be given back."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands where a tensor was."""

    index: int


def take_apart(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """(tensors, rest): the tensors in tuples, lists and dicts, however deep, and the same tree without them.

    Other objects are not looked into. What holds no tensor stays the very same object.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _strip(tree, tensors)


def rebuild(rest: Any, tensors: Sequence[Any]) -> Any:
    """The tree that `take_apart` saw, with these tensors in it."""
    return tensors[rest.index] if isinstance(rest, _Place) else _mapped(rest, rebuild, tensors)


# No nested functions here: one that calls itself is a reference cycle, which would hold the tensors until the garbage
# collector comes along.


def _strip(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return _Place(len(tensors) - 1)
    return _mapped(node, _strip, tensors)


def _mapped(node: Any, change: Callable[[Any, Any], Any], tensors: Sequence[Any]) -> Any:
    """The container with `change` applied to what it holds; the container itself if nothing in it changed."""
    kind = type(node)
    if isinstance(node, dict):
        changed = {key: change(value, tensors) for key, value in node.items()}
        if all(changed[key] is value for key, value in node.items()):
            return node
        made = copy.copy(node)  # keeps what subclasses know besides their items
        for key, value in changed.items():
            made[key] = value
        return made
    if kind in (tuple, list) or (isinstance(node, tuple) and isinstance(getattr(kind, "_fields", None), tuple)):
        items = [change(item, tensors) for item in node]
        if all(new is old for new, old in zip(items, node, strict=True)):
            return node
        return kind(items) if kind in (tuple, list) else kind(*items)
    return node


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """The tuple with its tensors cut from their graph, each requiring grad as before; on `device` if that is given."""
    if not isinstance(inputs, tuple):
        raise CheckpointingError(f"detach_variable got a {type(inputs).__name__}; it takes a tuple")

    def detach(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach() if device is None else value.detach().to(device)
        return moved.requires_grad_(value.requires_grad)

    return tuple(detach(value) for value in inputs)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[bool]]:
    """(tensors, others, flags) with a flag per object that says which it is; tuples for a tuple, else lists."""
    flags = [isinstance(value, torch.Tensor) for value in all_objects]
    tensors = [value for value, is_tensor in zip(all_objects, flags, strict=True) if is_tensor]
    others = [value for value, is_tensor in zip(all_objects, flags, strict=True) if not is_tensor]
    if isinstance(all_objects, tuple):
        return tuple(tensors), tuple(others), tuple(flags)
    return tensors, others, flags


def merge_tensors(
    tensor_objects: Sequence[Any], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple[Any, ...]:
    """What `extract_tensors` took apart, in its old order."""
    wanted = sum(map(bool, tensor_flags))
    if (wanted, len(tensor_flags) - wanted) != (len(tensor_objects), len(non_tensor_objects)):
        raise CheckpointingError(
            f"merge_tensors got {len(tensor_objects)} tensors and {len(non_tensor_objects)} others, but the flags "
            f"tell of {wanted} and {len(tensor_flags) - wanted}; give what extract_tensors returned"
        )
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if is_tensor else next(others) for is_tensor in tensor_flags)
