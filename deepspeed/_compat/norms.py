"""Norms and clipping of tensors that are cut over the ranks of a model-parallel group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import ReduceOp

__all__ = [
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "combine_grad_norm_groups",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_weight_norm",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
]

_EPSILON = 1e-6  # what is added to a norm before dividing by it
_INVALID = -1.0  # stands for a norm that is inf or NaN


def is_model_parallel_parameter(p: Tensor) -> bool:
    """True if the parameter is one rank's part of a larger one; others are equal on all ranks of the model."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def is_invalid_grad_norm(norm: float | Tensor) -> bool:
    """True if the norm is inf or NaN, or stands for one."""
    value = float(norm)
    return not math.isfinite(value) or value == _INVALID


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The 2-norm of everything whose parts have these 2-norms."""
    return math.sqrt(sum(norm**2 for norm in norm_list))


def combine_grad_norm_groups(norm_groups: Sequence[Tensor], norm_type: float = 2) -> Tensor:
    """The norm of everything whose parts have these norms."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norm_groups)), norm_type)
    return norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; the norm before, a 0-dim tensor.

    With an mpu the norm is that of the whole model: parameters that all ranks have count once.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in given if param.grad is not None]
    counted = [param.grad for param in given if param.grad is not None and _counts(param, mpu)]
    device = grads[0].device if grads else given[0].device if given else torch.device("cpu")
    total = _whole_norm(counted, float(norm_type), mpu, device)
    scale = (max_norm / (total + _EPSILON)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(device=grad.device, dtype=grad.dtype))
    return total


@torch.no_grad()
def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of these tensors over all ranks of the model (and of an expert group); -1 if it is inf or NaN."""
    tensors = list(input_tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    total = _whole_norm(tensors, float(norm_type), mpu, device, moe_ep_group)
    return torch.where(torch.isfinite(total), total, torch.full_like(total, _INVALID))


@torch.no_grad()
def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the parameters of the whole model; -1 if it is inf or NaN."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return float(get_global_norm_of_tensors([param.data for param in given if _counts(param, mpu)], norm_type, mpu))


@torch.no_grad()
def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: float | Tensor | None = None,
    mpu: Any = None,
    eps: float = _EPSILON,
) -> float | Tensor:
    """Scale tensors in place so that their norm, `global_norm` if given, is at most `max_norm`; the norm before."""
    tensors = list(input_tensors)
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    scale = max_norm / (float(norm) + eps)
    if 0 < scale < 1:
        for tensor in tensors:
            tensor.mul_(scale)
    return norm


def _counts(param: Tensor, mpu: Any) -> bool:
    return mpu is None or mpu.get_model_parallel_rank() == 0 or is_model_parallel_parameter(param)


def _whole_norm(
    tensors: Sequence[Tensor], norm_type: float, mpu: Any, device: torch.device, other_group: Any = None
) -> Tensor:
    """The norm over this rank's tensors and those of all ranks of the groups, in float32 on `device`."""
    norms = [torch.linalg.vector_norm(tensor.detach().float(), norm_type).to(device) for tensor in tensors]
    local = torch.stack(norms) if norms else torch.zeros(1, device=device)
    groups = [] if mpu is None else [mpu.get_model_parallel_group()]
    groups += [] if other_group is None else [other_group]
    if norm_type == math.inf:
        total = local.max()
        for group in groups:
            comm.all_reduce(total, op=ReduceOp.MAX, group=group)
        return total
    total = local.pow(norm_type).sum()
    for group in groups:
        comm.all_reduce(total, group=group)
    return total.pow(1 / norm_type)
