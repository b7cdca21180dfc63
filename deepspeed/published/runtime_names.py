"""Functions and flags of several modules of DeepSpeed that scripts use and the library does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.capability import has_triton

HAS_TRITON: bool = has_triton.holds


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


class MultiTensorApply:
    """Calls an op of Apex's form on lists of tensors: `op(chunk_size, overflow_buffer, tensor_lists, *args)`."""

    available, warned = True, False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


def set_device_rng_state(new_state: Tensor, device: int = -1) -> None:
    """Set the random state of a device; -1 is the current one."""
    accelerator = get_accelerator()
    accelerator.set_rng_state(new_state, accelerator.current_device() if device == -1 else device)


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """torch.autocast as the engine's forward has it; nothing where the config does not ask for it."""
    with engine._parts.precision.forward_context():
        yield


class TorchBackend:
    """torch.distributed for code that holds a backend, initialised when this is made unless it was before.

    Every method that is not defined here is the function of `deepspeed.comm` of that name.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        comm.init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
        self.name = name
        self.world_rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.world_group = comm.get_world_group()

    def __getattr__(self, name: str) -> Any:
        if name in comm.__all__:
            return getattr(comm, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_all_gather_function(self) -> Callable[..., Any]:
        """The function that gathers into one tensor."""
        return comm.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """The function that reduces one tensor to parts."""
        return comm.reduce_scatter_tensor
