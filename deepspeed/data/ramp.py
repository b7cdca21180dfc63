"""`Ramp`: a value as a function of the step, for everything that rises or falls while training goes on."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed.config.data import CurriculumSchedule, ProgressiveLayerDropConfig, RandomLTDScheduleConfig

__all__ = ["Ramp"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A pure function of the step, so that a resumed training is where it was."""

    at: Callable[[int], float]
    """The value at a step."""

    @classmethod
    def root(cls, low: int, high: int, steps: int, *, quantum: int, degree: int = 1) -> Ramp:
        """floor((t / steps)^(1 / degree) · (high − low) + low), down to a multiple of `quantum`, never below `low`.

        Where `low` is no multiple, the least one above it is the first value.
        """
        first = -(-low // quantum) * quantum

        def value(step: int) -> int:
            reached = math.floor((float(step) / steps) ** (1.0 / degree) * (high - low) + low)
            return int(min(max(reached - reached % quantum, first), high))

        return cls(value)

    @classmethod
    def stairs(cls, values: Sequence[int], last_steps: Sequence[int]) -> Ramp:
        """`values[i]` until step `last_steps[i]`, that one included; the last value has no end."""
        return cls(lambda step: values[bisect_left(last_steps, step)])

    @classmethod
    def decay(cls, limit: float, rate: float) -> Ramp:
        """(1 − limit) · exp(−rate · t) + limit."""
        return cls(lambda step: (1.0 - limit) * math.exp(-rate * step) + limit)

    @classmethod
    def of_difficulty(cls, schedule: CurriculumSchedule) -> Ramp | None:
        """The schedule of a valid section; None where the script brings its own."""
        section, low, high = schedule.schedule_config, schedule.min_difficulty, schedule.max_difficulty
        if schedule.schedule_type == "fixed_discrete":
            return cls.stairs(section.difficulty or (), section.max_step or ())
        steps, quantum = section.total_curriculum_step, section.difficulty_step
        if schedule.schedule_type == "custom" or not (low and high and steps and quantum):
            return None
        degree = section.root_degree if schedule.schedule_type == "fixed_root" and section.root_degree else 1
        return cls.root(low, high, steps, quantum=quantum, degree=degree)

    @classmethod
    def of_tokens(cls, schedule: RandomLTDScheduleConfig) -> Ramp:
        """How many tokens layers keep, of a valid section."""
        section, low, high = schedule.schedule_config, schedule.min_value, schedule.max_value
        steps, quantum = section.require_steps, section.seq_per_step
        if not (low and high and steps and quantum):
            raise AssertionError("the section was checked")
        return cls.root(low, high, steps, quantum=quantum)

    @classmethod
    def of_layers(cls, section: ProgressiveLayerDropConfig) -> Ramp:
        """The share of layers that are kept."""
        return cls.decay(section.theta, section.gamma)
