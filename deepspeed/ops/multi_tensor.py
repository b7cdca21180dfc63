"""Arithmetic over lists of tensors: the norm of all of them, scaling, and a·x + b·y.

A list may mix dtypes, devices and shapes, hold empty tensors, or be empty. float16 and bfloat16 are computed in
float32 and rounded once. Infinities and NaNs go through as in plain arithmetic: nothing is masked, also not by a
factor of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from deepspeed.ops.registry import implementation, op, reference

PART = 1 << 16
"""Elements of host memory that are summed at a time."""

T = TypeVar("T")


def global_norm(tensors: Iterable[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of all elements together, as a 0-dim tensor on the device of the first tensor.

    float32, or float64 where a tensor is; zero for an empty list. `p` may be infinite.
    """
    result: Tensor = op("global_norm")(list(tensors), p)
    return result


@torch.no_grad()
def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in float64, on the device of the first tensor.

    So wide that, rounded to float32, it does not depend on how the elements are cut into tensors.
    """
    filled = [part for tensor in tensors if tensor.numel() for part in _parts(tensor)]
    if not filled:
        return torch.zeros((), dtype=torch.float64)
    home = filled[0].device
    norms = [
        torch.stack(torch._foreach_norm(group, 2, dtype=torch.float64)).to(home)
        for group in _grouped(filled, lambda each: (each.device, each.dtype))
    ]
    return torch.cat(norms).square().sum()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A large tensor of host memory in parts: torch makes a copy in float64 of what it sums there, best in a cache."""
    if tensor.device.type != "cpu" or tensor.numel() <= PART or not tensor.is_contiguous():
        return (tensor,)
    return tuple(tensor.view(-1).split(PART))


def scale_(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor by `factor` in place; a 0-dim tensor spares the wait for its value."""
    op("scale")(list(tensors), factor)


def axpby_(a: float, xs: Iterable[Tensor], b: float, ys: Iterable[Tensor]) -> None:
    """ys ← a·xs + b·ys in place, element by element; each x has the shape and device of its y.

    An x may be its own y; any other overlap of the tensors has no defined result.
    """
    op("axpby")(a, list(xs), b, list(ys))


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 where one of the tensors is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _rounds_factors(tensor: Tensor) -> bool:
    """True if torch's in-place arithmetic rounds a factor to the tensor's dtype: 1e-8 would become 0 in float16."""
    return _narrow(tensor) and tensor.device.type == "cpu"


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _check_order(p: float) -> None:
    if not p > 0:
        raise ValueError(f"the order of a norm is a positive number or infinity, not {p}")


def _check_pairs(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    if len(xs) != len(ys):
        raise ValueError(f"axpby needs as many xs as ys: {len(xs)} and {len(ys)} were given")
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x.shape != y.shape or x.device != y.device:
            raise ValueError(
                f"axpby: x {index} is {tuple(x.shape)} on {x.device}, its y is {tuple(y.shape)} on {y.device}; "
                "each pair needs one shape and one device"
            )


def _combine(norms: Sequence[Tensor], tensors: Sequence[Tensor], p: float) -> Tensor:
    """The norm of norms; `tensors` is the whole list, which decides the device and the dtype of the result."""
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = _wide(*tensors)
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    result: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]), p)
    return result


@reference("global_norm")
@torch.no_grad()
def global_norm_reference(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """Tensor by tensor."""
    _check_order(p)
    norms = [torch.linalg.vector_norm(each, p, dtype=_wide(each)) for each in tensors if each.numel()]
    return _combine(norms, tensors, p)


@reference("scale")
@torch.no_grad()
def scale_reference(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Tensor by tensor, in the wide dtype."""
    for each in tensors:
        wide = _wide(each)
        by = factor.to(each.device, wide) if isinstance(factor, Tensor) else factor
        each.copy_(each.to(wide) * by)


@reference("axpby")
@torch.no_grad()
def axpby_reference(a: float, xs: Sequence[Tensor], b: float, ys: Sequence[Tensor]) -> None:
    """Pair by pair, in the wide dtype."""
    _check_pairs(xs, ys)
    for x, y in zip(xs, ys, strict=True):
        wide = _wide(x, y)
        y.copy_(a * x.to(wide) + b * y.to(wide))


@torch.no_grad()
def _global_norm_foreach(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    _check_order(p)
    norms: list[Tensor] = []
    filled = (each for each in tensors if each.numel())
    for group in _grouped(filled, lambda each: (each.device, each.dtype)):
        norms.extend(torch._foreach_norm(group, p, dtype=_wide(*group)))
    return _combine(norms, tensors, p)


@torch.no_grad()
def _scale_foreach(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and factor.device.type == "cpu":
        factor = factor.item()
    for group in _grouped(tensors, lambda each: (each.device, each.dtype)):
        on_device = isinstance(factor, Tensor)
        if _rounds_factors(group[0]) or (on_device and _narrow(group[0])):
            scale_reference(group, factor)  # tensor by tensor, which bounds the memory of the wide copies
        elif not isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor)
        else:
            torch._foreach_mul_(group, factor.to(group[0].device, group[0].dtype))


@torch.no_grad()
def _axpby_foreach(a: float, xs: Sequence[Tensor], b: float, ys: Sequence[Tensor]) -> None:
    _check_pairs(xs, ys)
    pairs = list(zip(xs, ys, strict=True))
    for group in _grouped(pairs, lambda pair: (pair[1].device, pair[0].dtype, pair[1].dtype)):
        sources, targets = [x for x, _ in group], [y for _, y in group]
        # Scaling y first would round it twice, and would change an x that is its own y.
        twice = b != 1 and (_narrow(targets[0]) or any(x.data_ptr() == y.data_ptr() for x, y in group))
        if twice or (a != 1 and _rounds_factors(targets[0])):
            axpby_reference(a, sources, b, targets)
            continue
        if b != 1:
            torch._foreach_mul_(targets, b)
        torch._foreach_add_(targets, sources, alpha=a)


@implementation("global_norm", name="foreach", rank=10)
def _load_global_norm() -> Callable[..., Tensor]:
    return _global_norm_foreach


@implementation("scale", name="foreach", rank=10)
def _load_scale() -> Callable[..., None]:
    return _scale_foreach


@implementation("axpby", name="foreach", rank=10)
def _load_axpby() -> Callable[..., None]:
    return _axpby_foreach
