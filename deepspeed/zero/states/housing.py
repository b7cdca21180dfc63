"""From a config to where states live, and what brings those of the disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.memory.files import file_engine
from deepspeed.memory.store import AtHome, Store
from deepspeed.memory.swap import SwapFile
from deepspeed.memory.tier import AT_HOME, Allotted, Homes, Share, Tier
from deepspeed.zero.budgeting import Budgeted, tile_of
from deepspeed.zero.states.disk import DiskStore
from deepspeed.zero.states.tiles import Tile, tiles_well

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["homes_of", "store_of"]

_BUFFERS = 4  # as many as the states of AdamW and one more
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def homes_of(schema: Schema, budgeted: Budgeted | None, stack: ExitStack) -> Homes:
    """Where the states of an engine live: as `offload_optimizer` or `memory` says; files are closed with `stack`."""
    zero, offload = schema.zero_optimization, schema.zero_optimization.offload_optimizer
    once = (schema.gradient_accumulation_steps or 1) == 1
    if budgeted is not None:
        swap = _swap(schema.memory.path, "memory.path", stack) if budgeted.states.get(Tier.DISK) else None
        return Homes(Allotted(budgeted.states), away=True, tile=tile_of(schema), once=once, swap=swap)
    if offload is None or not zero.offloads_optimizer:
        return AT_HOME
    tier, swap = _TIERS[offload.device.value], None
    if tier is Tier.DISK:
        swap = _swap(offload.nvme_path, "zero_optimization.offload_optimizer.nvme_path", stack)
    return Homes(
        Share(tier, float(offload.ratio)),
        away=offload.ratio > 0,
        pinned=offload.pin_memory,
        tile=tile_of(schema),
        once=once,
        swap=swap,
    )


def _swap(folder: Path | None, key: str, stack: ExitStack) -> SwapFile:
    assert folder is not None, "the config requires it"
    swap = SwapFile(folder, key)
    stack.callback(swap.close)
    return swap


def store_of(schema: Schema, homes: Homes, optimizer: Optimizer, stack: ExitStack) -> Store[Tile]:
    """What brings states to memory and back: nothing has to, unless they rest on the disk."""
    if homes.swap is None:
        return AtHome()
    if not tiles_well(optimizer):
        key = "memory.disk" if schema.memory.disk else "zero_optimization.offload_optimizer.device"
        raise DeepSpeedConfigError(
            f"{key}: states are to live on the disk, but a step of {type(optimizer).__name__} needs those of all "
            "parameters at once, or is not known to do without. Use AdamW or another optimizer of torch or of this "
            "library (except LBFGS), or host memory.",
            path=key,
        )
    offload = schema.zero_optimization.offload_optimizer
    # of each of the tiles that are read, updated and written at a time
    buffers = 3 * (int(offload.buffer_count) if offload is not None else _BUFFERS)
    store = DiskStore(optimizer, file_engine(schema.aio), buffers)
    stack.callback(store.close)
    return store
