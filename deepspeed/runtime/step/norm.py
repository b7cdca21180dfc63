"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops.multi_tensor import global_norm, sum_of_squares

__all__ = ["clip_coefficient", "total_norm"]

_EPSILON = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds, so that both clip alike


def total_norm(
    shared: Sequence[Tensor], split: Sequence[Tensor], model_group: Any = None, *, wide: bool = False
) -> Tensor:
    """The L2 norm of all gradients of the whole model.

    `split` gradients are parts of tensors that lie on all ranks of `model_group`; `shared` ones are there whole on
    every rank and count once. `wide` sums in float64.
    """
    if wide:
        return _wide_norm(_dense(shared), _dense(split), model_group)
    dense_shared, dense_split = _dense(shared), _dense(split)
    if model_group is None:
        return global_norm([*dense_shared, *dense_split])
    norm = global_norm(dense_split)
    if not dense_split and dense_shared:
        norm = norm.to(dense_shared[0].device)
    squared = norm.square()
    comm.all_reduce(squared, group=model_group)
    return (squared + global_norm(dense_shared).square().to(squared.device)).sqrt()


def _wide_norm(shared: list[Tensor], split: list[Tensor], model_group: Any) -> Tensor:
    squares = [sum_of_squares(shared), sum_of_squares(split)]
    if model_group is not None:
        squares[1] = squares[1].to(squares[0].device)
        comm.all_reduce(squares[1], group=model_group)
    return (squares[0] + squares[1].to(squares[0].device)).sqrt().float()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by so that their norm is at most `limit`."""
    return torch.clamp(limit / (norm + _EPSILON), max=1.0)


def _dense(grads: Sequence[Tensor]) -> list[Tensor]:
    """Sparse gradients count by their values, once their duplicates are summed."""
    return [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
