"""Where a step needs most memory: bytes by kind at that moment, and the module that was running."""

from __future__ import annotations

from deepspeed.profiling.memory_profiler.profiler import MemoryPeak, MemoryProfiler

__all__ = ["MemoryPeak", "MemoryProfiler"]
