"""Where the tensors of a model under construction live, in which dtype, and over which ranks they are sharded.

[Note: dtype at birth] Factory functions keep torch's default dtype; a module's parameters are cast once its constructor
is through. So initialisers draw the same values as without `zero.Init`, and tables that need fp32 are not spoiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import LayoutError, UsageError
from deepspeed.parallel import AxisGroup, ParallelLayout, layout_from_mpu
from deepspeed.parallel.mpu import current_layout
from deepspeed.parallel.process_groups import create_group, ranks_of
from deepspeed.precision.cast import CASTABLE, BufferRule, parameter_dtypes
from deepspeed.zero.parameters.shard import shard_of
from deepspeed.zero.placement import ShardAxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DeepSpeedTensorOverride(Enum):
    """What `zero.Init` decides about new tensors; without it they stay as the script made them."""

    dtype = 1
    device = 2


@dataclass(frozen=True)
class ConstructionSite:
    """A device and a dtype for what is constructed; None leaves it to the script."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    buffers: BufferRule = field(default_factory=BufferRule)

    def factories(self) -> AbstractContextManager[Any]:
        """A context in which factory functions make tensors on the device, unless they are given another one."""
        return nullcontext() if self.device is None else self.device

    @torch.no_grad()
    def put(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Move and cast what a constructor has made; returns the parameters that are not sharded yet.

        What has no values yet, on the meta device or lazy, is left alone.
        """
        fresh = [
            (name, param)
            for name, param in module.named_parameters()
            if shard_of(param) is None and not is_lazy(param) and not param.is_meta
        ]
        exceptions = {} if self.dtype is None or not fresh else parameter_dtypes(module, self.dtype, self.buffers)
        for _, param in fresh:
            dtype = param.dtype
            if self.dtype is not None and dtype in CASTABLE:
                dtype = exceptions.get(id(param), self.dtype)
            device = param.device if self.device is None else self.device
            if (dtype, device) != (param.dtype, param.device):
                param.data = param.data.to(device, dtype)
        if self.device is not None:
            for buffer in module.buffers():
                if not buffer.is_meta and not is_lazy(buffer) and buffer.device != self.device:
                    buffer.data = buffer.data.to(self.device)
        return fresh


def rank_device() -> tuple[int, torch.device]:
    """(local rank, the device of this process), which becomes the current one."""
    accelerator = get_accelerator()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if accelerator.device_name() == "cpu":
        return local_rank, torch.device("cpu")
    accelerator.set_device(local_rank)
    return local_rank, torch.device(accelerator.device_name(local_rank))


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """A factory function whose floating-point results have this dtype, on the rank's device unless it is given one.

    For clients that replace it around `zero.Init` so that `arange` keeps its dtype. There every factory function does,
    see [Note: dtype at birth], so `zero.Init` does not call this.
    """

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = rank_device()[1] if target_device is None else target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return made


class GivenAxis(AxisGroup):
    """The ranks of a process group that was made elsewhere."""

    __slots__ = ()

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._hosts = group, None
        self.ranks = ranks_of(group)
        self.rank = self.ranks.index(comm.get_rank())

    @property
    def name(self) -> str:
        """It has no axis to be named after."""
        return "given"

    @property
    def group(self) -> ProcessGroup:
        """The process group itself."""
        assert self._group is not None, "it was given"
        return self._group

    def twin(self, backend: str | None = None) -> ProcessGroup:
        """A further group of the same ranks; its members make it together."""
        group = create_group(self.ranks, alone=True, backend=backend)
        assert group is not None, "this rank is a member"
        return group

    def split(self, *, intra_node: bool = False, size: int | None = None) -> tuple[AxisGroup, AxisGroup]:
        """Not of a bare group."""
        raise LayoutError(f"a bare process group of the ranks {list(self.ranks)} cannot be split; use a layout")


def construction_axis(
    group: Any, mpu: Any, *, on_hosts: bool, shard_size: int = -1
) -> tuple[AxisGroup, AxisGroup | None]:
    """The ranks of a group, else the data-parallel ranks of an mpu, else all ranks; with MiCS (shards, equal shards).

    `on_hosts` asks for groups that carry host tensors, whatever the devices are.
    """
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"zero.Init: the given group is a {type(group).__name__}; a torch.distributed process group that this "
                "rank is a member of is expected"
            )
        axis: AxisGroup = GivenAxis(group)
    elif mpu is not None:
        axis = current_layout.keep(layout_from_mpu(mpu)).samples
    else:
        axis = ParallelLayout.build().samples
    shard, replicas = ShardAxes(lambda _: axis, shard_size).levels(axis)
    if on_hosts and axis.size > 1 and dist.get_backend(axis.group) != dist.Backend.GLOO:
        return GivenAxis(shard.twin("gloo")), None if replicas is None else GivenAxis(replicas.twin("gloo"))
    return shard, replicas
