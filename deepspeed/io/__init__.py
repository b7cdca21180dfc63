"""Files for `torch.save`: written by an `aio_handle`, by Python, or not at all. And the commands that measure disks."""

from __future__ import annotations

from deepspeed.io.fast_file_writer import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
