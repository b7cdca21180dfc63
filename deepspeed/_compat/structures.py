"""Tensors inside lists, tuples and dicts: move, copy, measure, compare; and hooks on those that a model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "OutputBackwardHookManager",
    "compare_tensors_in_structures",
    "copy_to_device",
    "get_tensor_bytes",
    "move_to_device",
    "register_output_backward_hooks",
]

Device = str | torch.device


def copy_to_device(item: Any, device: Device, criterion_func: Callable[[Any], bool]) -> Any:
    """The same structure with those leaves that meet the criterion on `device`; what is there already is not copied."""
    return _mapped(item, lambda leaf: leaf.to(device) if criterion_func(leaf) else leaf)


def move_to_device(item: Any, device: Device, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The same structure with its tensors on `device`.

    With a criterion, the leaves that meet it stay the same objects with their memory moved, as parameters must.
    """
    if criterion_func is None:
        return copy_to_device(item, device, torch.is_tensor)

    def moved(leaf: Any) -> Any:
        if criterion_func(leaf):
            leaf.data = leaf.data.to(device)
        return leaf

    return _mapped(item, moved)


def get_tensor_bytes(item: Any) -> int:
    """Bytes of all tensors in the structure."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(item) if isinstance(leaf, Tensor))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """True if both have the same structure, with equal tensors and equal values in it."""
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Tensor):
        same_kind = inputs1.shape == inputs2.shape and inputs1.dtype == inputs2.dtype
        return same_kind and torch.equal(inputs1, inputs2.to(inputs1.device))
    if isinstance(inputs1, Mapping):
        return inputs1.keys() == inputs2.keys() and all(
            compare_tensors_in_structures(value, inputs2[key]) for key, value in inputs1.items()
        )
    if isinstance(inputs1, (list, tuple)):
        return len(inputs1) == len(inputs2) and all(map(compare_tensors_in_structures, inputs1, inputs2))
    return bool(inputs1 == inputs2)


class OutputBackwardHookManager:
    """Calls a function when backward reaches the first output, and another for every output that it reaches."""

    def __init__(
        self,
        preprocess_once_fn: Callable[[], None],
        preprocess_per_tensor_fn: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.preprocess_once_fn = preprocess_once_fn
        self.preprocess_per_tensor_fn = preprocess_per_tensor_fn
        self.preprocess_done = False
        self.hook_handles: list[Any] = []

    def register_hooks_on_outputs(self, outputs: Any) -> None:
        """Watch the tensors in `outputs` that have a gradient function."""
        for tensor in _leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self.hook_handles.append(tensor.register_hook(self._hook(tensor)))

    def remove_hooks(self) -> None:
        """Watch no longer."""
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()

    def reset(self) -> None:
        """Watch no longer, and begin anew with the next outputs."""
        self.remove_hooks()
        self.preprocess_done = False

    def _hook(self, tensor: Tensor) -> Callable[[Tensor], None]:
        def reached(grad: Tensor) -> None:
            if not self.preprocess_done:
                self.preprocess_done = True
                self.preprocess_once_fn()
            if self.preprocess_per_tensor_fn is not None:
                self.preprocess_per_tensor_fn(tensor)

        return reached


def register_output_backward_hooks(
    outputs: Any,
    preprocess_once_fn: Callable[[], None],
    preprocess_per_tensor_fn: Callable[[Tensor], None] | None = None,
) -> OutputBackwardHookManager:
    """Watch these outputs; the object that watches, whose `remove_hooks` ends it."""
    manager = OutputBackwardHookManager(preprocess_once_fn, preprocess_per_tensor_fn)
    manager.register_hooks_on_outputs(outputs)
    return manager


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, tuple) and hasattr(item, "_fields"):  # a namedtuple takes its fields one by one
        return type(item)(*(_mapped(each, change) for each in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(each, change) for each in item)
    if isinstance(item, dict):
        return type(item)((key, _mapped(value, change)) for key, value in item.items())
    return change(item)


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value)
    elif isinstance(item, (list, tuple)):
        for each in item:
            yield from _leaves(each)
    else:
        yield item
