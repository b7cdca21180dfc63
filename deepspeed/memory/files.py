"""The file engine of a config."""

from __future__ import annotations

from deepspeed.config.aio import AioConfig
from deepspeed.ops.aio import FileEngine

__all__ = ["file_engine"]


def file_engine(aio: AioConfig) -> FileEngine:
    """The file engine of the section `aio`."""
    return FileEngine(
        block_size=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.intra_op_parallelism,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
    )
