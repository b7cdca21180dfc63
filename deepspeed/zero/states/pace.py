"""`Pace`: how the tiles of a step follow each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["Pace"]


@dataclass(frozen=True)
class Pace:
    """How the tiles of a step follow each other."""

    tile: int = 0
    """Elements that are updated at a time on the device; 0 means all."""
    ahead: int = 1
    """Tiles that are read from the disk while one is updated."""
    behind: int = 1
    """Tiles that are written to the disk meanwhile."""
    pinned: bool = True
    """Buffers through which weights return to the device are page-locked."""
    late: bool = False
    """The caller goes on while states in other tiers are updated."""
    cores: float = 1.0
    """Share of the threads that update them (`cpuadam_cores_perc` of `super_offload`)."""

    @classmethod
    def of(cls, schema: Schema, tile: int | None, *, pinned: bool, late: bool) -> Pace:
        """As the config says; tiles of `sub_group_size` elements, if `tile` is None."""
        zero, offload = schema.zero_optimization, schema.zero_optimization.offload_optimizer
        given = set() if offload is None else offload.model_fields_set
        ahead = offload is None or "pipeline_read" not in given or offload.pipeline_read
        behind = offload is None or "pipeline_write" not in given or offload.pipeline_write
        made = cls(int(zero.sub_group_size) if tile is None else tile, int(ahead), int(behind), pinned, late)
        if offload is not None and offload.super_offload:
            return replace(made, late=True, cores=float(offload.cpuadam_cores_perc))
        if zero.zenflow is not None:
            cores = 1.0 - float(zero.zenflow.pt_reserved_cores_perc)
            return replace(made, late=late or zero.zenflow.overlap_step, cores=cores)
        return made
