"""How many floating-point operations a model needs, how long each module takes, and what that means per second."""

from __future__ import annotations

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
