"""From a config to where the parameters of stage 3 live, and how they come to the device."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.config.offload import DeepSpeedZeroOffloadParamConfig
from deepspeed.memory.files import file_engine
from deepspeed.memory.swap import SwapFile
from deepspeed.memory.tier import Allotted, Tier
from deepspeed.parallel.hierarchy import local_ranks
from deepspeed.zero.birth.site import rank_device
from deepspeed.zero.parameters.gather import Gather
from deepspeed.zero.parameters.in_files import FileGather, InFiles, Limits
from deepspeed.zero.parameters.remote import HostGather, InHostMemory, Remote, Remotes
from deepspeed.zero.parameters.sharding import numel_of
from deepspeed.zero.placement import LiesOn

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema
    from deepspeed.zero.budgeting import Budgeted

__all__ = ["gather_from", "remote_of", "remotes_of", "reserve", "uses_disk"]

_WIDEST = 4  # bytes of an element of a parameter, at most
_ANY = 1 << 62


def remotes_of(schema: Schema, budgeted: Budgeted | None, stack: ExitStack) -> Remotes | None:
    """As `offload_param` or `memory` says; None: all chunks are on the device. Files are closed with `stack`."""
    if budgeted is None:
        remote = remote_of(schema, stack)
        return None if remote is None else Remotes(remote)
    room = budgeted.parameters
    if not room.get(Tier.HOST) and not room.get(Tier.DISK):
        return None
    folder = schema.memory.path if room.get(Tier.DISK) else None
    return Remotes(_remote(schema, folder, _within(room.get(Tier.HOST, 0)), stack), Allotted(room))


def remote_of(schema: Schema, stack: ExitStack) -> Remote | None:
    """Where chunks live as `offload_param` says, or before a plan is made of `memory`; None: on the device."""
    offload, memory = schema.zero_optimization.offload_param, schema.memory
    if memory.device is not None:
        in_memory = _ANY if memory.host is None else memory.host // local_ranks() // _WIDEST
        return _remote(schema, memory.path, _within(in_memory), stack)
    if offload is None or not schema.zero_optimization.offloads_parameters:
        return None
    limits = Limits(int(offload.max_in_cpu), int(offload.buffer_count), int(offload.buffer_size), offload.pin_memory)
    return _remote(schema, offload.nvme_path if offload.device.value == "nvme" else None, limits, stack)


def uses_disk(schema: Schema) -> bool:
    """True if states or parameters may lie in files."""
    return bool(schema.memory.disk or schema.zero_optimization.swap_folders)


def reserve(remotes: Remotes, module: nn.Module, lies_on: LiesOn) -> None:
    """Make sure of space for all chunks of a model that will lie in files."""
    remote, foreseen = remotes.remote, copy.deepcopy(remotes.rooms)
    if isinstance(remote, InFiles):
        chunks = [(-(-numel_of(param) // lies_on(param).size), param.dtype) for param in module.parameters()]
        remote.reserve(each for each in chunks if foreseen.place([each[0]]) != [Tier.DEVICE])


def _within(in_memory: int) -> Limits:
    """So many elements in host memory, and buffers as they are without a word of the config."""
    default = DeepSpeedZeroOffloadParamConfig()
    return Limits(in_memory, int(default.buffer_count), int(default.buffer_size), default.pin_memory)


def _remote(schema: Schema, folder: Path | None, limits: Limits, stack: ExitStack) -> Remote:
    """Files in a folder, or host memory without one."""
    device = rank_device()[1]
    if folder is None:
        return InHostMemory(device, pinned=limits.pinned)
    key = "zero_optimization.offload_param.nvme_path" if schema.memory.path is None else "memory.path"
    swap = SwapFile(folder, key)
    stack.callback(swap.close)
    engine = file_engine(schema.aio)
    stack.callback(engine.close)
    return InFiles(device, swap, engine, limits)


def gather_from(remote: Remote, among: Gather) -> Gather:
    """How chunks become whole on the device."""
    return FileGather(remote, among) if isinstance(remote, InFiles) else HostGather(remote.device, among)
