"""Ranks and groups: who is there, who is in which group, making and ending groups, meshes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as td
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import shared_memory
from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import CommOperation
from deepspeed.errors import CommError, LayoutError, RendezvousError

_run = DEFAULT.run

# Making a group is a collective of the world: a rank that does not call it leaves the others waiting.
_NEW_GROUP = CommOperation("new_group", lambda ranks, keywords: td.new_group(ranks, **keywords), timed=False)


def is_available() -> bool:
    """True if this torch was built with torch.distributed."""
    return bool(td.is_available())


def is_initialized() -> bool:
    """True once there is a world group, made by this package or not."""
    return is_available() and bool(td.is_initialized())


def _need_world(what: str) -> None:
    if not is_initialized():
        raise CommError(
            f"{what} needs torch.distributed, which is not initialised. "
            "Call deepspeed.init_distributed() (or deepspeed.initialize) first."
        )


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in the group; -1 if it is not in it."""
    _need_world("get_rank")
    return int(td.get_rank(group))


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in the group; -1 if this process is not in it."""
    _need_world("get_world_size")
    return int(td.get_world_size(group))


def get_local_rank() -> int:
    """This process's rank on its machine: LOCAL_RANK, or 0 where there is only one process."""
    value = os.environ.get("LOCAL_RANK", "")
    if value.isdigit():
        return int(value)
    if not value and (not is_initialized() or td.get_world_size() == 1):
        return 0
    raise RendezvousError(
        f"LOCAL_RANK={value!r} does not say which of this machine's processes this is. "
        "Start the job with the deepspeed launcher or torchrun, or set LOCAL_RANK to 0, 1, … on each machine."
    )


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The world rank of the group's member number `group_rank`."""
    _need_world("get_global_rank")
    return int(td.get_global_rank(get_world_group() if group is None else group, group_rank))


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The world ranks of the group's members, in group order."""
    _need_world("get_all_ranks_from_group")
    return list(td.get_process_group_ranks(group))


def get_world_group() -> ProcessGroup:
    """The group of all ranks."""
    _need_world("get_world_group")
    world = td.group.WORLD
    assert world is not None, "initialised torch.distributed has a world group"
    return world


def new_group(ranks: Sequence[int] | None = None, **torch_keywords: Any) -> ProcessGroup:
    """Make a group of these world ranks (default: all); every rank of the world must call it, in the same order.

    Takes the keywords of `torch.distributed.new_group` (timeout, backend, pg_options, group_desc, …) as well.
    """
    members = None if ranks is None else list(ranks)
    return _run(  # type: ignore[no-any-return]
        _NEW_GROUP, (members, torch_keywords), None, None, False, (False, "new_group", None)
    )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End a group, or (without one) all of them and torch.distributed with them."""
    _need_world("destroy_process_group")
    DEFAULT.forget(group)
    shared_memory.forget(None if group is td.GroupMember.WORLD else group)
    td.destroy_process_group(group)


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Where tensors must live to travel over this group: the accelerator if the group's backend is its own."""
    accelerator = get_accelerator()
    if accelerator.communication_backend_name() in str(td.get_backend(group)) and accelerator.device_name() != "cpu":
        return torch.device(accelerator.current_device_name())
    return torch.device("cpu")


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """torch's DeviceMesh over all ranks, one name per mesh axis."""
    _need_world("initialize_mesh_device")
    shape, names = tuple(mesh_shape), tuple(mesh_dim_names)
    world = td.get_world_size()
    if len(shape) != len(names) or math.prod(shape) != world:
        raise LayoutError(
            f"a mesh of shape {shape} named {names} does not tile {world} ranks. "
            f"Give one name per axis and sizes whose product is {world}."
        )
    return init_device_mesh(group_device().type, shape, mesh_dim_names=names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Let the group of that name use symmetric memory (CUDA only)."""
    device = get_accelerator().device_name()
    if device != "cuda":
        raise CommError(
            f"symmetric memory needs CUDA devices; this process uses {device!r}. Leave it off on this accelerator."
        )
    # Imported late: it loads Triton, and only this function needs it.
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    with warnings.catch_warnings():
        # Some versions of torch enable it by themselves and say that the call is not needed; others need it.
        warnings.simplefilter("ignore", FutureWarning)
        enable(group_name)  # type: ignore[arg-type]


def has_all_gather_into_tensor() -> bool:
    """True if torch can gather into one tensor."""
    return any(name in vars(td) for name in ("all_gather_single", "all_gather_into_tensor"))


def has_reduce_scatter_tensor() -> bool:
    """True if torch can reduce-scatter from one tensor."""
    return any(name in vars(td) for name in ("reduce_scatter_single", "reduce_scatter_tensor"))


def has_all_reduce_coalesced() -> bool:
    """True: many tensors are reduced with one collective on every backend."""
    return True


def has_coalescing_manager() -> bool:
    """True if torch can batch several collectives into one launch."""
    return "_coalescing_manager" in vars(td.distributed_c10d)
