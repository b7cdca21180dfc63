"""Arithmetic over lists of tensors: the norm of all of them, sums of squares, and scaling.

A list may mix dtypes, devices and shapes, hold empty tensors, or be empty. float16 and bfloat16 are computed in
float32 and rounded once. Infinities and NaNs go through as in plain arithmetic: nothing is masked, also not by a
factor of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.ops.registry import implements, op, reference

PART = 1 << 16
"""Elements of host memory that are summed at a time."""


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
    norms = [torch.stack(torch._foreach_norm(group, 2, dtype=torch.float64)).to(home) for group in _grouped(filled)]
    return torch.cat(norms).square().sum()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A large tensor of host memory in parts: torch makes a copy in float64 of what it sums there, best in a cache."""
    if tensor.device.type != "cpu" or tensor.numel() <= PART or not tensor.is_contiguous():
        return (tensor,)
    return tuple(tensor.view(-1).split(PART))


def scale_(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor by `factor` in place; a 0-dim tensor spares the wait for its value."""
    op("scale")(list(tensors), factor)


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 where one of the tensors is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors by device and dtype."""
    tensors = list(tensors)
    kinds = dict.fromkeys([(tensor.device, tensor.dtype) for tensor in tensors])
    return [[tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind] for kind in kinds]


def _check_order(p: float) -> None:
    if not p > 0:
        raise ValueError(f"the order of a norm is a positive number or infinity, not {p}")


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


@implements("global_norm", name="foreach")
@torch.no_grad()
def _global_norm_foreach(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    _check_order(p)
    norms: list[Tensor] = []
    filled = (each for each in tensors if each.numel())
    for group in _grouped(filled):
        norms.extend(torch._foreach_norm(group, p, dtype=_wide(*group)))
    return _combine(norms, tensors, p)


@implements("scale", name="foreach")
@torch.no_grad()
def _scale_foreach(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and factor.device.type == "cpu":
        factor = factor.item()
    for group in _grouped(tensors):
        narrow, on_cpu = group[0].dtype in (torch.float16, torch.bfloat16), group[0].device.type == "cpu"
        if narrow and (on_cpu or isinstance(factor, Tensor)):  # torch rounds the factor: 1e-8 would be 0 in float16
            scale_reference(group, factor)  # tensor by tensor, which bounds the memory of the wide copies
        elif not isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor)
        else:
            torch._foreach_mul_(group, factor.to(group[0].device, group[0].dtype))
