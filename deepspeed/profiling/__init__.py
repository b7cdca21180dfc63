"""Measurements of training, each a subscriber of the engine's events: times, throughput, memory, progress."""

from __future__ import annotations

from deepspeed.profiling.memory import MemoryBreakdown, see_memory_usage
from deepspeed.profiling.progress import ProgressBar, StepLine
from deepspeed.profiling.throughput import Throughput
from deepspeed.profiling.timers import WallClock

__all__ = [
    "MemoryBreakdown",
    "ProgressBar",
    "StepLine",
    "Throughput",
    "WallClock",
    "see_memory_usage",
]
