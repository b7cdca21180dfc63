"""`TorchBackend`: the functions of `deepspeed.comm` as methods of an object, for code that holds a backend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from deepspeed import comm


class TorchBackend:
    """torch.distributed, initialised when this is made unless it was before.

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
