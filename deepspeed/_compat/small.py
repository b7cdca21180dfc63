"""Functions of a few lines that were gathered in one module once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.zero.parameters.shard import ZeroParamStatus

__all__ = [
    "DummyOptim",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "call_to_str",
    "empty_cache",
    "ensure_directory_exists",
    "filter_empty_parameters",
    "get_inactive_params",
    "get_only_unique_item",
    "noop_context",
    "noop_decorator",
    "set_random_seed",
]

T = TypeVar("T")

noop_context = contextlib.nullcontext


class DummyOptim:
    """Parameters in the shape of an optimizer that updates nothing."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def noop_decorator(func: T) -> T:
    """The function itself."""
    return func


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """How a call is written: `name(1, key='value')`."""
    given = [repr(each) for each in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder in which this file will lie."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def get_only_unique_item(items: Iterable[T]) -> T:
    """The one value that all items have."""
    found = list(items)
    unique = set(found)
    if len(unique) != 1:
        raise RuntimeError(f"expected one value that all items share, found {found}")
    return unique.pop()


def empty_cache() -> None:
    """Give unused memory of the device back to the system."""
    get_accelerator().empty_cache()


def filter_empty_parameters(params: Iterable[Tensor]) -> list[Tensor]:
    """Without those that have no elements; one that is sharded has as many as it has when it is whole."""
    return [param for param in params if getattr(param, "ds_numel", param.numel()) > 0]


def get_inactive_params(param_list: Iterable[Tensor]) -> list[Tensor]:
    """The sharded parameters that are not whole at the moment."""
    return [param for param in param_list if getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The tensors, and zeros after them if their elements are no multiple of `alignment` in number."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[Tensor], partitioned_param_groups: Sequence[Sequence[Tensor]], dp_process_group: Sequence[Any]
) -> None:
    """Fill each flat tensor with its parts: rank r of the group's process group has part r."""
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        comm.all_gather_into_tensor(flat, parts[comm.get_rank(group)].contiguous(), group=group)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Bring every rank's part into `partitioned_param_groups`, views of `groups_flat`, at most a bucket at a time.

    A bucket begins at a multiple of `start_alignment_factor` × ranks elements within a part.
    """
    for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        ranks, rank = comm.get_world_size(group), comm.get_rank(group)
        step = max(allgather_bucket_size // ranks // start_alignment_factor, 1) * start_alignment_factor
        length = parts[0].numel()
        for start in range(0, length, step):
            pieces = [part.narrow(0, start, min(step, length - start)) for part in parts]
            comm.all_gather(pieces, pieces[rank].clone(), group=group)
