"""Where the tensors of a model under construction live, and in which dtype.

[Note: dtype at birth] Factory functions keep torch's default dtype; a module's parameters are cast once its constructor
is through. So initialisers draw the values that they draw without `zero.Init`, which the engine casts in the same way,
and tables that need fp32, like those of rotary embeddings, are not spoiled. The price is one module's parameters in
the default dtype for a moment. Spellings that no mode of torch can see (`torch.Tensor(2, 2)`, `torch.FloatTensor`)
need no care either: they make host tensors, which follow with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.accelerator import get_accelerator
from deepspeed.precision.cast import BufferRule, parameter_dtypes
from deepspeed.precision.dtypes import CASTABLE
from deepspeed.zero.parameters.shard import shard_of

__all__ = ["DeepSpeedTensorOverride", "Placement", "rank_device", "zero_wrapper_for_fp_tensor_constructor"]


class DeepSpeedTensorOverride(Enum):
    """What `zero.Init` decides about new tensors; without it they stay as the script made them."""

    dtype = 1
    device = 2


@dataclass(frozen=True)
class Placement:
    """A device and a dtype for what is constructed; None leaves it to the script."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    buffers: BufferRule = field(default_factory=BufferRule)

    def factories(self) -> AbstractContextManager[Any]:
        """A context in which factory functions make tensors on the device, unless they are told another one."""
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
