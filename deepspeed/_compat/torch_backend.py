"""Communication as an object: the functions of `deepspeed.comm` as methods, for code that holds a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed as td

from deepspeed import comm
from deepspeed.config.comm import CommsLoggerConfig

__all__ = [
    "Backend",
    "DeepSpeedCommsConfig",
    "Noop",
    "TorchBackend",
    "disable_compiler_collective",
    "get_coalescing_manager",
]

F = TypeVar("F", bound=Callable[..., Any])


class DeepSpeedCommsConfig:
    """The `comms_logger` section of a config that is a plain dict."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger = CommsLoggerConfig(**ds_config.get("comms_logger", {}))
        self.comms_logger_enabled = self.comms_logger.enabled


class Noop:
    """The handle of an operation that has nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class Backend:
    """Base of backends: a name, this process's rank among `size`, and whether it was initialised."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group: Any = None
        self.world_size = size
        self.world_rank = rank
        self.process_groups: list[Any] = []
        self.initialized = False

    def is_initialized(self) -> bool:
        """True once `init_process_group` was called."""
        return self.initialized

    def new_group(self, *args: Any, **kwargs: Any) -> Any:
        """Make a group of ranks; a backend that can overrides this."""
        raise TypeError(f"backend {self.name!r} makes no groups: {type(self).__name__} has to define new_group")

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """From now on the backend can be used."""
        self.initialized = True


class TorchBackend(Backend):
    """torch.distributed, initialised when this is made unless it was before."""

    # Every collective is the function of `deepspeed.comm` itself, so that it is recorded as any other.
    all_gather = staticmethod(comm.all_gather)
    all_gather_base = staticmethod(comm.all_gather_into_tensor)
    all_gather_coalesced = staticmethod(comm.all_gather_coalesced)
    all_gather_into_tensor = staticmethod(comm.all_gather_into_tensor)
    all_gather_object = staticmethod(comm.all_gather_object)
    all_reduce = staticmethod(comm.all_reduce)
    all_reduce_coalesced = staticmethod(comm.all_reduce_coalesced)
    all_to_all = staticmethod(comm.all_to_all)
    all_to_all_single = staticmethod(comm.all_to_all_single)
    barrier = staticmethod(comm.barrier)
    batch_isend_irecv = staticmethod(comm.batch_isend_irecv)
    broadcast = staticmethod(comm.broadcast)
    broadcast_object_list = staticmethod(comm.broadcast_object_list)
    destroy_process_group = staticmethod(comm.destroy_process_group)
    enable_symm_mem_for_group = staticmethod(comm.enable_symm_mem_for_group)
    gather = staticmethod(comm.gather)
    get_backend = staticmethod(comm.get_backend)
    get_global_rank = staticmethod(comm.get_global_rank)
    get_rank = staticmethod(comm.get_rank)
    get_world_group = staticmethod(comm.get_world_group)
    get_world_size = staticmethod(comm.get_world_size)
    has_all_gather_into_tensor = staticmethod(comm.has_all_gather_into_tensor)
    has_reduce_scatter_tensor = staticmethod(comm.has_reduce_scatter_tensor)
    inference_all_reduce = staticmethod(comm.inference_all_reduce)
    init_device_mesh = staticmethod(comm.initialize_mesh_device)
    irecv = staticmethod(comm.irecv)
    isend = staticmethod(comm.isend)
    monitored_barrier = staticmethod(comm.monitored_barrier)
    recv = staticmethod(comm.recv)
    reduce = staticmethod(comm.reduce)
    reduce_scatter = staticmethod(comm.reduce_scatter)
    reduce_scatter_tensor = staticmethod(comm.reduce_scatter_tensor)
    scatter = staticmethod(comm.scatter)
    send = staticmethod(comm.send)

    def __init__(
        self,
        backend: str,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        super().__init__(name=name)
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.world_rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.world_group = comm.get_world_group()

    def init_process_group(
        self, backend: str, timeout: timedelta | None, init_method: str | None, rank: int, world_size: int
    ) -> None:
        """As `deepspeed.init_distributed`."""
        comm.init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)

    def is_initialized(self) -> bool:
        """True while torch.distributed has a process group."""
        return comm.is_initialized()

    def new_group(self, ranks: list[int]) -> Any:
        """A group of these ranks; all ranks call this."""
        group = comm.new_group(ranks)
        self.process_groups.append(group)
        return group

    def get_all_gather_function(self) -> Callable[..., Any]:
        """The function that gathers into one tensor."""
        return comm.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """The function that reduces one tensor to parts."""
        return comm.reduce_scatter_tensor


def disable_compiler_collective(func: F) -> F:
    """The function, which torch.compile calls as it is instead of looking into it."""
    return cast(F, torch.compiler.disable(func))


def get_coalescing_manager(group: Any, device: torch.device, reqs: Any, async_op: bool) -> Any:
    """torch's context in which collectives of one kind become one; `reqs` is for versions that needed a list."""
    return td._coalescing_manager(group, device=device, async_ops=async_op)  # type: ignore[attr-defined]
