"""`CurriculumScheduler`: the difficulty of a curriculum by the step; and batches cut to a length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from deepspeed.config.data import CurriculumSchedule, CurriculumScheduleConfig, RandomLTDScheduleConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError

__all__ = ["CurriculumScheduler", "Ramp", "cut_to_length"]


class CurriculumScheduler:
    """The difficulty at each step; `config` is a section of the curriculum, other keys of which are ignored."""

    def __init__(self, config: Mapping[str, Any] | CurriculumSchedule) -> None:
        self.schedule = config if isinstance(config, CurriculumSchedule) else _read(config)
        self._ramp = Ramp.of_difficulty(self.schedule)
        self.min_difficulty, self.max_difficulty = self.schedule.min_difficulty or 1, self.schedule.max_difficulty or 1
        self._current = self.min_difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """What schedule_type custom asks for the difficulty at a step."""
        self._ramp = Ramp(schedule_function)

    def get_difficulty(self, global_steps: int) -> int:
        if self._ramp is None:
            raise DeepSpeedConfigError(
                "schedule_type is custom, and no function was given; call "
                "engine.set_custom_curriculum_learning_schedule({metric: function of the step}) before training",
                path="schedule_type",
            )
        return int(self._ramp.at(global_steps))

    def update_difficulty(self, global_steps: int) -> int:
        """Go to a step; a difficulty that has reached its maximum stays there."""
        if self._current < self.max_difficulty:
            self._current = self.get_difficulty(global_steps)
        return self._current

    def get_current_difficulty(self) -> int:
        """The difficulty of the last update."""
        return self._current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Go to a difficulty without a step."""
        self._current = difficulty

    def get_state(self) -> dict[str, Any]:
        """The keys of the schedule, and where it is."""
        return {**self.schedule.model_dump(include=set(CurriculumSchedule.model_fields)), **self.state_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        self._current = state["current_difficulty"]

    def state_dict(self) -> dict[str, int]:
        return {"current_difficulty": self._current}

    load_state_dict = set_state


def _read(config: Mapping[str, Any]) -> CurriculumSchedule:
    known = {name: value for name, value in config.items() if name in CurriculumSchedule.model_fields}
    if isinstance(known.get("schedule_config"), dict):
        inner = CurriculumScheduleConfig.model_fields
        known["schedule_config"] = {name: v for name, v in known["schedule_config"].items() if name in inner}
    try:
        schedule = CurriculumSchedule.model_validate(known)
        problems = list(schedule.schedule_problems())
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}, found {each['input']!r}" for each in error.errors()
        ]
    if problems:
        raise DeepSpeedConfigError("\n".join(problems), path="curriculum_learning")
    return schedule


def cut_to_length(batch: Any, length: int) -> Any:
    """The batch without what lies behind `length` tokens of its sequences, in whatever it is nested.

    The tokens are `input_ids` or `inputs_embeds`, else the first tensor of two dims or more; every tensor whose second
    dim is as long as theirs is cut there, and one of four dims, which is a mask, in the last two.
    """
    whole = _length_of(batch)
    if whole is None:
        raise UsageError(
            f"cut_batches is true, and a batch ({type(batch).__name__}) has no tensor of [samples, tokens, …] to cut; "
            "remove the key, or give the model such tensors"
        )
    return batch if whole <= length else _cut(batch, whole, length)


def _cut(value: Any, whole: int, length: int) -> Any:
    if isinstance(value, Tensor):
        for dim in (2, 3) if value.dim() == 4 else (1,) if value.dim() > 1 else ():
            if value.shape[dim] == whole:
                value = value.narrow(dim, 0, length).contiguous()  # models use view(-1)
        return value
    if isinstance(value, Mapping):
        return type(value)({name: _cut(each, whole, length) for name, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(each, whole, length) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(each, whole, length) for each in value)
    return value


def _length_of(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[1] if value.dim() > 1 else None
    if isinstance(value, Mapping):
        named = [value[name] for name in ("input_ids", "inputs_embeds") if isinstance(value.get(name), Tensor)]
        value = [*named, *value.values()]
    found = map(_length_of, value) if isinstance(value, (list, tuple)) else ()
    return next((each for each in found if each is not None), None)


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
