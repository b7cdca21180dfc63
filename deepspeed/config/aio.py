"""The `aio` section: how files are read and written when state is on NVMe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .model import PositiveCount, Section

__all__ = ["AioConfig"]


class AioConfig(Section):
    """Asynchronous file access, for NVMe offload and the fast checkpoint writer."""

    renamed_under: ClassVar[str | None] = "aio"

    block_size: PositiveCount = Field(1_048_576, description="Size of one read or write request, in bytes.")
    queue_depth: PositiveCount = Field(8, description="Number of requests in flight at a time.")
    intra_op_parallelism: PositiveCount = Field(1, description="Number of threads that share one read or write.")
    single_submit: bool = Field(False, description="Whether requests are submitted one by one, not in batches.")
    overlap_events: bool = Field(
        True, description="Whether new requests are submitted before the earlier ones are finished."
    )
    use_gds: bool = Field(False, description="Whether data goes straight between disk and GPU memory (CUDA only).")
