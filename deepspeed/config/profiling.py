"""The `flops_profiler`, `memory_profiler` and `timers` sections."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from .model import Count, PositiveCount, Section
from .values import Number, Whole

__all__ = ["FlopsProfilerConfig", "MemoryProfilerConfig", "ThroughputTimerConfig", "TimersConfig"]


class FlopsProfilerConfig(Section):
    """Floating-point operations, parameters and latency per module, measured in one step."""

    enabled: bool = Field(
        False, description="Whether rank 0 profiles one step; this also turns on wall_clock_breakdown."
    )
    recompute_fwd_factor: Annotated[Number, Ge(0)] = Field(
        0.0, description="Share of forward that backward repeats; backward counts as 2 plus this times forward."
    )
    profile_step: Count = Field(1, description="Number of the optimizer step that is profiled.")
    module_depth: Annotated[Whole, Ge(-1)] = Field(
        -1, description="Depth of the module tree for which totals are shown; -1 is the deepest."
    )
    top_modules: PositiveCount = Field(1, description="Number of modules listed per depth.")
    detailed: bool = Field(True, description="Whether the profile of every single module is shown.")
    output_file: str | None = Field(None, description="File that receives the report; null is standard output.")


class MemoryProfilerConfig(Section):
    """Memory by kind when one step needs most of it, and the module that was running."""

    enabled: bool = Field(False, description="Whether rank 0 profiles one step.")
    profile_step: Count = Field(1, description="Number of the optimizer step that is profiled.")
    top_modules: PositiveCount = Field(10, description="Number of modules listed whose activations were alive.")
    output_file: str | None = Field(None, description="File that receives the report; null is standard output.")


class ThroughputTimerConfig(Section):
    """Samples per second, reported every steps_per_print steps."""

    enabled: bool = Field(True, description="Whether throughput is measured.")
    synchronized: bool = Field(True, description="Whether the device is synchronised around each measurement.")


class TimersConfig(Section):
    """Timers that run during training."""

    throughput: ThroughputTimerConfig = Field(
        default_factory=ThroughputTimerConfig, description="Measurement of samples per second."
    )
