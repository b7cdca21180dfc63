"""The search for the fastest config: forecasts, short runs of the user's script, and what they showed."""

from __future__ import annotations

from deepspeed.autotuning.autotuner import Autotuner as Autotuner

__all__ = ["Autotuner"]
