"""Checks of running training: copies that must be equal, and sampled steps that are computed a second time."""

from deepspeed.verify.replay import ReplayReport, replay

__all__ = ["ReplayReport", "replay"]
