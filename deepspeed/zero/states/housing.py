"""From a config to where states live, and what brings those of the disk."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.files import file_engine
from deepspeed.memory.store import AtHome, Store
from deepspeed.memory.swap import SwapFile
from deepspeed.memory.tier import AT_HOME, Homes, Tier
from deepspeed.zero.states.disk import DiskStore
from deepspeed.zero.states.tiles import Tile, tiles_well

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["homes_of", "store_of"]

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def homes_of(schema: Schema, stack: ExitStack) -> Homes:
    """Where the states of an engine live: as `offload_optimizer` says; a swap file is closed with `stack`."""
    zero, offload = schema.zero_optimization, schema.zero_optimization.offload_optimizer
    if offload is None or not zero.offloads_optimizer:
        return AT_HOME
    tile = max(int(zero.sub_group_size), 1) if "sub_group_size" in zero.model_fields_set else AT_HOME.tile
    swap = None
    if _TIERS[offload.device.value] is Tier.DISK:
        assert offload.nvme_path is not None, "the config requires it"
        swap = SwapFile(offload.nvme_path, "zero_optimization.offload_optimizer.nvme_path")
        stack.callback(swap.close)
    return Homes(
        _TIERS[offload.device.value],
        pinned=offload.pin_memory,
        share=float(offload.ratio),
        tile=tile,
        once=(schema.gradient_accumulation_steps or 1) == 1,
        swap=swap,
    )


def store_of(schema: Schema, homes: Homes, optimizer: Optimizer, stack: ExitStack) -> Store[Tile]:
    """What brings states to memory and back: nothing has to, unless they rest on the disk."""
    if homes.swap is None:
        return AtHome()
    if not tiles_well(optimizer):
        raise DeepSpeedConfigError(
            f"zero_optimization.offload_optimizer.device is nvme, but a step of {type(optimizer).__name__} needs the "
            'states of all parameters at once. Use an optimizer of torch or of this library, or device "cpu".',
            path="zero_optimization.offload_optimizer.device",
        )
    offload = schema.zero_optimization.offload_optimizer
    # of each of the tiles that are read, updated and written at a time
    buffers = 3 * int(offload.buffer_count) if offload is not None else 0
    store = DiskStore(optimizer, file_engine(schema.aio), buffers)
    stack.callback(store.close)
    return store
