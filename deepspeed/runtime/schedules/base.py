"""What every learning-rate schedule shares: its position, writing to the optimizer's groups, checking of numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from deepspeed.log import logger
from deepspeed.runtime.schedules.curves import WARMUP_LINEAR_RATE, WARMUP_LOG_RATE

__all__ = [
    "LRSchedule",
    "at_least",
    "get_torch_optimizer",
    "number",
    "own_lrs",
    "positive_int",
    "switch",
    "update_lr",
    "warmup_steps",
    "warmup_type_of",
    "whole",
]


class _HasGroups(Protocol):
    param_groups: list[dict[str, Any]]


def get_torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer in `optimizer`, which may be wrapped; a wrapper of another kind needs `param_groups`."""
    found = optimizer
    while not isinstance(found, Optimizer):
        inner = getattr(found, "optimizer", None)
        if inner is None or inner is found:
            break
        found = inner
    if isinstance(found, Optimizer):
        return found
    if isinstance(getattr(optimizer, "param_groups", None), list):
        return optimizer
    raise TypeError(
        f"a schedule got a {type(optimizer).__name__}; it needs a torch.optim.Optimizer, or a wrapper that has one "
        "as its attribute `optimizer` or has `param_groups`"
    )


def update_lr(param_groups: Iterable[dict[str, Any]], lrs: Iterable[float]) -> list[float]:
    """Give each group its learning rate; a tensor (a capturable optimizer's) is written in place. Returns them."""
    used = []
    for group, lr in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        used.append(lr)
    return used


class LRSchedule(ABC):
    """A schedule: a function of `last_batch_iteration` whose value is written to the optimizer's groups.

    See [Note: the step k] in curves.py. The learning rate is in force as soon as the schedule is built, stepped
    or loaded. A group that is added to the optimizer later keeps its own learning rate.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer: _HasGroups = get_torch_optimizer(optimizer)
        self.last_batch_iteration = whole(last_batch_iteration, "last_batch_iteration", -1)
        self._last_lr: list[float] = []

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as last written."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """The position; everything else comes from the constructor."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continue at a saved position; the learning rate of that position is in force at once."""
        if "last_batch_iteration" not in sd:
            raise ValueError(
                f"{type(self).__name__} got a state with the keys {sorted(sd)}; it needs last_batch_iteration. "
                "The state was saved by another kind of schedule"
            )
        self._move_to(sd["last_batch_iteration"])

    def _move_to(self, k: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if k is None else k
        self._apply()

    def _apply(self) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _per_group(self, value: float | Sequence[float], name: str) -> list[float]:
        """One number of at least 0 per group from one number for all, or from a list of the right length."""
        count = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values and the optimizer has {count} parameter groups; "
                    f"give one number, or {count}"
                )
            return [at_least(item, name, 0) for item in value]
        return [at_least(value, name, 0)] * count


def own_lrs(optimizer: _HasGroups) -> list[float]:
    """Each group's learning rate, before a schedule has touched it."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def number(value: Any, name: str) -> float:
    """`value`, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return value


def at_least(value: Any, name: str, bound: float, *, exclusive: bool = False) -> float:
    """`value`, if it is a number not below (with `exclusive`: above) the bound."""
    given = number(value, name)
    if given < bound or (exclusive and given == bound):
        raise ValueError(f"{name} is {value}; it must be {'more than' if exclusive else 'at least'} {bound}")
    return given


def positive_int(value: Any, name: str) -> int:
    """`value`, if it is an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value


def whole(value: Any, name: str, bound: int) -> int:
    """`value`, if it is an integer not below the bound."""
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {bound}")
    return value


def switch(value: Any, name: str) -> bool:
    """`value`, if it is true or false: the text "false" would be true."""
    if value not in (True, False):  # and 1 and 0, which are equal to them
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def warmup_steps(value: Any) -> int:
    """The length of a warmup: at least 2, since a logarithmic one divides by ln(steps)."""
    return max(2, positive_int(value, "warmup_num_steps"))


def warmup_type_of(value: str) -> str:
    """`value`, if it names a kind of warmup; else a warning, and the logarithmic one."""
    if value in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        return value
    logger.warning(
        "warmup_type %r is unknown; it is one of %s, %s. The warmup is %s",
        *(value, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE, WARMUP_LOG_RATE),
    )
    return WARMUP_LOG_RATE
