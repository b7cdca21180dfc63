"""The five learning-rate schedules, with their curves as pure functions of the step k, and any torch schedule by name.

[Note: the step k]
k is `last_batch_iteration`: −1 when the schedule is built, then 0, 1, 2, … after each optimizer step. The value at
k = −1 therefore governs the first update, the value at k = 0 the second. A curve depends on k alone, so resuming,
jumping and going back are all the same evaluation.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import logger

if TYPE_CHECKING:
    from deepspeed.config.optimizer import SchedulerConfig


WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"


def line(low: float, high: float, share: float) -> float:
    """The point that lies `share` of the way from `low` to `high`."""
    return low + (high - low) * share


def warmup(k: int, steps: int, kind: str) -> float:
    """Share of the way from the minimum to the maximum: 0 up to k = 0, 1 from k = steps on.

    Logarithmic: ln(k + 1) / ln(steps); linear: k / steps.
    """
    if k < 0:
        return 0.0
    if k >= steps:
        return 1.0
    return k / steps if kind == WARMUP_LINEAR_RATE else math.log(k + 1) / math.log(steps)


def linear_decay(k: int, steps: int, total: float) -> float:
    """Share that is left after the warmup: 1 at k = steps, 0 from k = total on."""
    return max(0.0, (total - k) / max(1.0, total - steps))


def cosine(k: int, steps: int, total: float, floor: float) -> float:
    """Half a cosine after the warmup, from just below 1 at k = steps to `floor` from k = total − 1 on."""
    progress = min(1.0, (k - steps + 1) / max(1.0, total - steps))
    return line(floor, 1.0, (1.0 + math.cos(math.pi * progress)) / 2)


def growth(k: int, size: int, rate: float, staircase: bool) -> float:
    """Factor of the range test: 1 at k = −1, and `rate` more for every `size` steps, in jumps if a staircase."""
    position = (k + 1) // size if staircase else (k + 1) / size
    return 1.0 + rate * position


def _stair(done: float, whole: float, stairs: int) -> float:
    return done / whole if stairs <= 0 else (done * stairs // whole) / stairs


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

    See [Note: the step k]. The learning rate is in force as soon as the schedule is built, stepped
    or loaded. A group that is added to the optimizer later keeps its own learning rate.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer: Any = get_torch_optimizer(optimizer)
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

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(last_batch_iteration)

    def _move_to(self, k: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if k is None else k
        self._apply()

    def _apply(self) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _own_lrs(self) -> list[float]:
        """Each group's learning rate, before a schedule has touched it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set_warmup(self, steps: Any, kind: str) -> None:
        """At least 2 steps, since a logarithmic warmup divides by ln(steps); one of unknown kind is logarithmic."""
        self.warmup_num_steps = max(2, whole(steps, "warmup_num_steps", 1))
        self.warmup_type = kind if kind in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE) else WARMUP_LOG_RATE
        if self.warmup_type != kind:
            logger.warning(
                "warmup_type %r is unknown; it is one of %s, %s. The warmup is %s",
                *(kind, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE, WARMUP_LOG_RATE),
            )

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


def at_least(value: Any, name: str, bound: float, *, exclusive: bool = False) -> float:
    """`value`, if it is a finite number not below (with `exclusive`: above) the bound."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    if value < bound or (exclusive and value == bound):
        raise ValueError(f"{name} is {value}; it must be {'more than' if exclusive else 'at least'} {bound}")
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
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._own_lrs() if warmup_max_lr is None else self._per_group(warmup_max_lr, "warmup_max_lr")
        self._set_warmup(warmup_num_steps, warmup_type)
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        share = self._share()
        return [line(low, high, share) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self) -> float:
        return warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


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
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        # First, since the curve is evaluated as soon as the warmup is set up.
        self.total_num_steps = at_least(total_num_steps, "total_num_steps", 0, exclusive=True)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(self)

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._share()
        return linear_decay(self.last_batch_iteration, self.warmup_num_steps, self.total_num_steps)


class LayerTokenLR(WarmupDecayLR):
    """WarmupDecayLR from 0 to the optimizer's rate and back, whose clock are the layer tokens that were consumed."""

    def __init__(self, optimizer: Any, total: int, warmup: int, kind: str, consumed: Callable[[], int]) -> None:
        self._consumed = consumed
        super().__init__(optimizer, total, 0.0, None, max(warmup, 1), kind)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(self._consumed() if last_batch_iteration is None else last_batch_iteration)


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
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.org_lrs = self._own_lrs()
        self.warmup_min_ratio = at_least(warmup_min_ratio, "warmup_min_ratio", 0)
        self.cos_min_ratio = at_least(cos_min_ratio, "cos_min_ratio", 0)
        self._set_warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = at_least(total_num_steps, "total_num_steps", 0, exclusive=True)
        _warn_if_short(self)
        self._apply()

    def get_lr_ratio(self) -> float:
        """What the groups' own learning rates are multiplied by at `last_batch_iteration`."""
        k, steps = self.last_batch_iteration, self.warmup_num_steps
        if k < 0:
            return 0.0
        if k < steps:
            return line(self.warmup_min_ratio, 1.0, warmup(k, steps, self.warmup_type))
        return cosine(k, steps, self.total_num_steps, self.cos_min_ratio)

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


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
        self.step_size = whole(lr_range_test_step_size, "lr_range_test_step_size", 1)
        self.step_rate = at_least(lr_range_test_step_rate, "lr_range_test_step_rate", 0)
        self.staircase = switch(lr_range_test_staircase, "lr_range_test_staircase")
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        factor = growth(self.last_batch_iteration, self.step_size, self.step_rate, self.staircase)
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
        self._first = at_least(cycle_first_step_size, "cycle_first_step_size", 0, exclusive=True)
        second = self._first if cycle_second_step_size is None else cycle_second_step_size
        self._second = at_least(second, "cycle_second_step_size", 0)
        self._first_stairs = whole(cycle_first_stair_count, "cycle_first_stair_count", -1)
        stairs = self._first_stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self._second_stairs = whole(stairs, "cycle_second_stair_count", -1)
        self._decay_size = at_least(decay_step_size, "decay_step_size", 0)
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
        if self._over():
            return [low / self._decayed(self.decay_lr_rate) for low in self.min_lrs]
        height = self._height()
        return [line(low, high, height) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at `last_batch_iteration`; None where momentum does not cycle."""
        if not self.cycle_momentum:
            return None
        if self._over():
            grown = self._decayed(self.decay_mom_rate)
            moms = [min(high * grown, max(high, _HIGHEST_MOMENTUM)) for high in self.max_moms]
        else:
            height = self._height()
            moms = [line(high, low, height) for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [(mom, group["betas"][1]) for mom, group in zip(moms, self.optimizer.param_groups, strict=False)]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go one step on, or to the given position."""
        self._move_to(batch_iteration)

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _over(self) -> bool:
        """True once the cycle has ended and the decay runs."""
        return self.last_batch_iteration >= self._first + self._second

    def _height(self) -> float:
        """0 at the ends of the cycle, 1 at its top; with n stairs only multiples of 1/n, rounded down."""
        at = (self.last_batch_iteration + 1) % (self._first + self._second)
        if at <= self._first:
            return _stair(at, self._first, self._first_stairs)
        return _stair(self._first + self._second - at, self._second, self._second_stairs)

    def _decayed(self, rate: float) -> float:
        """1 plus `rate` for every `decay_step_size` steps since the cycle ended; 1 where there is no decay."""
        if self._decay_size == 0 or rate == 0:
            return 1.0
        return 1.0 + rate * (self.last_batch_iteration + 1 - self._first - self._second) / self._decay_size

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
    from deepspeed.config.optimizer import REFUSALS, check_scheduler

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
        schedule.step(samples)  # of some libraries, which take the number
