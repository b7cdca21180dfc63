"""The step of the learning-rate schedule that follows one of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from deepspeed.errors import UsageError

__all__ = ["require_metric", "step_schedule"]


def require_metric(schedule: Any, given: Mapping[str, Any]) -> None:
    """Refuse, before anything is updated, a schedule that looks at a metric and is given none."""
    if isinstance(schedule, ReduceLROnPlateau) and "metrics" not in given:
        raise UsageError(
            "scheduler: ReduceLROnPlateau needs a metric at each of its steps, and engine.step() was given none. Call "
            "engine.step(lr_kwargs={'metrics': loss}), with a number that is the same on all ranks; or give the engine "
            "no schedule, and call its step yourself where you evaluate."
        )


def step_schedule(schedule: Any, given: Mapping[str, Any], samples: int) -> None:
    """Go one step on, with what `engine.step` was given; schedules that count samples go on by so many."""
    if given:
        schedule.step(**given)
        return
    try:
        schedule.step()
    except TypeError:
        schedule.step(samples)  # of some libraries, which must be told by how much
