"""From a config to where the parameters of stage 3 live, and how they come to the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from deepspeed.memory.files import file_engine
from deepspeed.memory.swap import SwapFile
from deepspeed.zero.birth.site import rank_device
from deepspeed.zero.parameters.gather import Gather
from deepspeed.zero.parameters.in_files import FileGather, InFiles, Limits
from deepspeed.zero.parameters.remote import HostGather, InHostMemory, Remote

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["gather_from", "remote_of"]


def remote_of(schema: Schema, stack: ExitStack) -> Remote | None:
    """Where chunks live as `offload_param` says; None: on the device. What is opened is closed with `stack`."""
    offload = schema.zero_optimization.offload_param
    if offload is None or not schema.zero_optimization.offloads_parameters:
        return None
    device = rank_device()[1]
    if offload.device.value == "cpu":
        return InHostMemory(device, pinned=offload.pin_memory)
    assert offload.nvme_path is not None, "the config requires it"
    swap = SwapFile(offload.nvme_path, "zero_optimization.offload_param.nvme_path")
    stack.callback(swap.close)
    engine = file_engine(schema.aio)
    stack.callback(engine.close)
    return InFiles(
        device,
        swap,
        engine,
        Limits(int(offload.max_in_cpu), int(offload.buffer_count), int(offload.buffer_size), offload.pin_memory),
    )


def gather_from(remote: Remote, among: Gather) -> Gather:
    """How chunks become whole on the device."""
    return FileGather(remote, among) if isinstance(remote, InFiles) else HostGather(remote.device, among)
