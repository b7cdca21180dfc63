"""Names of `deepspeed.runtime.{config,utils}` and flags that scripts use and the library does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops.capability import has_triton

HAS_TRITON: bool = has_triton.holds

ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"


def is_model_parallel_parameter(p: Tensor) -> bool:
    """True if the parameter is one rank's part of a larger one; others are equal on all ranks of the model."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def move_to_device(item: Any, device: str | torch.device, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The same lists, tuples and dicts with their tensors on `device`.

    With a criterion, the leaves that meet it stay the same objects with their memory moved, as parameters must.
    """

    def moved(leaf: Any) -> Any:
        if criterion_func is None:
            return leaf.to(device) if torch.is_tensor(leaf) else leaf
        if criterion_func(leaf):
            leaf.data = leaf.data.to(device)
        return leaf

    return _mapped(item, moved)


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, tuple) and hasattr(item, "_fields"):  # a namedtuple takes its fields one by one
        return type(item)(*(_mapped(each, change) for each in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(each, change) for each in item)
    if isinstance(item, dict):
        return type(item)((key, _mapped(value, change)) for key, value in item.items())
    return change(item)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


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
