"""Files beside the computation: `FileEngine`, and `AsyncIOBuilder().load().aio_handle(...)` as scripts know it."""

from __future__ import annotations

from deepspeed.ops.aio.engine import FileEngine, FileTicket
from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "FileEngine", "FileTicket"]
