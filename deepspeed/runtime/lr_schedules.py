"""The five learning-rate schedules, and any torch schedule by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import logger
from deepspeed.runtime.schedules import curves
from deepspeed.runtime.schedules.base import (
    LRSchedule,
    at_least,
    get_torch_optimizer,
    own_lrs,
    positive_int,
    switch,
    warmup_steps,
    warmup_type_of,
    whole,
)

if TYPE_CHECKING:
    from deepspeed.config.optimizer import SchedulerConfig

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

# The decay of OneCycle makes momentum grow; at 1 no gradient would count any more.
_HIGHEST_MOMENTUM = 0.999


class WarmupLR(LRSchedule):
    """From the minimum to the maximum in `warmup_num_steps` (at least 2) steps, logarithmic or linear; then constant.

    Without `warmup_max_lr` the maximum is each group's own learning rate. The first two updates both run at the
    minimum, since k = −1 and k = 0 give the same value.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = curves.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        if warmup_max_lr is None:
            self.max_lrs = own_lrs(self.optimizer)
        else:
            self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = warmup_steps(warmup_num_steps)
        self.warmup_type = warmup_type_of(warmup_type)
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        share = self._share()
        return [curves.line(low, high, share) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(last_batch_iteration)

    def _share(self) -> float:
        return curves.warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then straight down to the minimum at `total_num_steps`.

    The maximum is 0.001 unless given, where WarmupLR takes the optimizer's learning rate.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = curves.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        # First, since the curve is evaluated as soon as the warmup is set up.
        self.total_num_steps = at_least(total_num_steps, "total_num_steps", 0, exclusive=True)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(self)

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._share()
        return curves.linear_decay(self.last_batch_iteration, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(LRSchedule):
    """A warmup from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio`, times each group's own rate.

    The first update (k = −1) runs at 0 whatever `warmup_min_ratio` is, and after a linear warmup the cosine starts
    just below 1: both are part of the published curve, and kept.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = curves.WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.org_lrs = own_lrs(self.optimizer)
        self.warmup_min_ratio = at_least(warmup_min_ratio, "warmup_min_ratio", 0)
        self.cos_min_ratio = at_least(cos_min_ratio, "cos_min_ratio", 0)
        self.warmup_num_steps = warmup_steps(warmup_num_steps)
        self.warmup_type = warmup_type_of(warmup_type)
        self.total_num_steps = at_least(total_num_steps, "total_num_steps", 0, exclusive=True)
        _warn_if_short(self)
        self._apply()

    def get_lr_ratio(self) -> float:
        """What the groups' own learning rates are multiplied by at `last_batch_iteration`."""
        k, steps = self.last_batch_iteration, self.warmup_num_steps
        if k < 0:
            return 0.0
        if k < steps:
            return curves.line(self.warmup_min_ratio, 1.0, curves.warmup(k, steps, self.warmup_type))
        return curves.cosine(k, steps, self.total_num_steps, self.cos_min_ratio)

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(last_batch_iteration)


class LRRangeTest(LRSchedule):
    """A learning rate that grows without bound, to find the largest one with which training still converges."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive_int(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = at_least(lr_range_test_step_rate, "lr_range_test_step_rate", 0)
        self.staircase = switch(lr_range_test_staircase, "lr_range_test_staircase")
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        factor = curves.growth(self.last_batch_iteration, self.step_size, self.step_rate, self.staircase)
        return [lr * factor for lr in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(batch_iteration)


class OneCycle(LRSchedule):
    """Up to the maximum and down again while momentum (beta1) does the opposite, then a slow decay.

    Momentum starts at its maximum, as the cycle says, and the optimizer keeps its own beta2. What is called the
    decay of momentum makes it grow; it is held at 0.999 where it would go on to 1 and beyond. Momentum stays as it
    is, with a warning, if a parameter group has no `betas`.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = at_least(cycle_first_step_size, "cycle_first_step_size", 0, exclusive=True)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        stairs = whole(cycle_first_stair_count, "cycle_first_stair_count", -1)
        later = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.cycle = curves.Cycle(
            first=first,
            second=at_least(second, "cycle_second_step_size", 0),
            first_stairs=stairs,
            second_stairs=whole(later, "cycle_second_stair_count", -1),
            decay_size=at_least(decay_step_size, "decay_step_size", 0),
        )
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate = at_least(decay_lr_rate, "decay_lr_rate", 0)
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        if max(*self.min_moms, *self.max_moms) >= 1:
            raise ValueError(f"cycle_max_mom is {cycle_max_mom}, cycle_min_mom {cycle_min_mom}; both must be below 1")
        self.decay_mom_rate = at_least(decay_mom_rate, "decay_mom_rate", 0)
        self.cycle_momentum = switch(cycle_momentum, "cycle_momentum") and self._has_betas()
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        k = self.last_batch_iteration
        if self.cycle.over(k):
            return [low / self.cycle.decayed(k, self.decay_lr_rate) for low in self.min_lrs]
        height = self.cycle.height(k)
        return [curves.line(low, high, height) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at `last_batch_iteration`; None where momentum does not cycle."""
        if not self.cycle_momentum:
            return None
        k = self.last_batch_iteration
        if self.cycle.over(k):
            grown = self.cycle.decayed(k, self.decay_mom_rate)
            moms = [min(high * grown, max(high, _HIGHEST_MOMENTUM)) for high in self.max_moms]
        else:
            height = self.cycle.height(k)
            moms = [curves.line(high, low, height) for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [(mom, group["betas"][1]) for mom, group in zip(moms, self.optimizer.param_groups, strict=False)]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(batch_iteration)

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _has_betas(self) -> bool:
        without = [i for i, group in enumerate(self.optimizer.param_groups) if "betas" not in group]
        if without:
            logger.warning(
                "OneCycle does not cycle momentum: %s has no betas in its parameter groups %s. Set "
                "cycle_momentum to false to say so yourself",
                type(self.optimizer).__name__,
                without,
            )
        return not without


def build_scheduler(section: SchedulerConfig, optimizer: Any) -> Any:
    """The schedule that a config's scheduler section names: one of ours, else a torch.optim.lr_scheduler class."""
    # Imported here: reading a config needs pydantic, the schedules themselves do not.
    from deepspeed.config.params import REFUSALS, check_scheduler

    kind, params = section.type, dict(section.params)
    if kind is None:
        raise DeepSpeedConfigError("scheduler.type: missing; name the schedule to build", path="scheduler.type")
    problems = check_scheduler({"type": kind, "params": params}, ())
    if problems:
        raise DeepSpeedConfigError("\n".join(map(str, problems)), path=problems[0].path)
    schedule = _SCHEDULES.get(kind) or getattr(lr_scheduler, kind)
    for name, parameter in inspect.signature(schedule).parameters.items():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name != "optimizer" and not variable and parameter.default is parameter.empty and name not in params:
            path = f"scheduler.params.{name}"
            raise DeepSpeedConfigError(f"{path}: {kind} needs it, and it is not given", path=path)
    target = get_torch_optimizer(optimizer)
    try:
        return schedule(target, **params)
    except REFUSALS as error:
        # Our own messages begin with the parameter's name.
        named = str(error).partition(" ")[0]
        path = f"scheduler.params.{named}" if named in params else "scheduler.params"
        raise DeepSpeedConfigError(f"{path}: {kind}: {error}", path=path) from error


_SCHEDULES: dict[str, Any] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_SCHEDULES)


def _warn_if_short(schedule: WarmupDecayLR | WarmupCosineLR) -> None:
    if schedule.total_num_steps < schedule.warmup_num_steps:
        logger.warning(
            "%s: total_num_steps (%s) is less than warmup_num_steps (%s), so the warmup is longer than the training",
            *(type(schedule).__name__, schedule.total_num_steps, schedule.warmup_num_steps),
        )
