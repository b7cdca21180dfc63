"""Files for `torch.save`: written by an `aio_handle`, by Python, or not at all. And the commands that measure disks."""

from __future__ import annotations

from deepspeed.io.fast_file_writer import FastFileWriter, FastFileWriterConfig
from deepspeed.io.mock_file_writer import MockFileWriter
from deepspeed.io.py_file_writer import PyFileWriter

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
