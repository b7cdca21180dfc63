"""Learning-rate schedules on the command line: names, `add_tuning_arguments`, and arguments to a scheduler section."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from deepspeed.runtime.schedules.curves import WARMUP_LINEAR_RATE, WARMUP_LOG_RATE

__all__ = [
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_MOMENTUM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "LR_RANGE_TEST",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "LR_SCHEDULE",
    "ONE_CYCLE",
    "TOTAL_NUM_STEPS",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE",
    "WARMUP_LR",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
    "parse_arguments",
]

LR_SCHEDULE = "lr_schedule"

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

_RANGE_TEST = (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE)
_CYCLE_COUNTS = (CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)
_ONE_CYCLE = (
    *(CYCLE_FIRST_STEP_SIZE, *_CYCLE_COUNTS, DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE),
    *(CYCLE_MOMENTUM, CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE),
)
_WARMUP = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_COSINE = (TOTAL_NUM_STEPS, WARMUP_NUM_STEPS, WARMUP_TYPE, WARMUP_MIN_RATIO, COS_MIN_RATIO)

_PARAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        LR_RANGE_TEST: _RANGE_TEST,
        ONE_CYCLE: _ONE_CYCLE,
        WARMUP_LR: _WARMUP,
        WARMUP_DECAY_LR: (TOTAL_NUM_STEPS, *_WARMUP),
        WARMUP_COSINE_LR: _COSINE,
    }
)

# Where a schedule's highest (or, for the range test, first) learning rate is given, and its value if it is not.
_LR: Mapping[str, tuple[str, float | None]] = MappingProxyType(
    {
        LR_RANGE_TEST: (LR_RANGE_TEST_MIN_LR, 1e-3),
        ONE_CYCLE: (CYCLE_MAX_LR, None),
        WARMUP_LR: (WARMUP_MAX_LR, None),
        WARMUP_DECAY_LR: (WARMUP_MAX_LR, 1e-3),
    }
)

_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    (LR_RANGE_TEST_MIN_LR, float, 0.001, "Learning rate at which the range test starts."),
    (LR_RANGE_TEST_STEP_RATE, float, 1.0, "Growth of the learning rate per step of the range test."),
    (LR_RANGE_TEST_STEP_SIZE, int, 1000, "Optimizer steps in one step of the range test."),
    (CYCLE_FIRST_STEP_SIZE, int, 1000, "Optimizer steps of the rising half of the cycle."),
    (CYCLE_FIRST_STAIR_COUNT, int, -1, "Stairs of the rising half; none if 0 or less."),
    (CYCLE_SECOND_STEP_SIZE, int, -1, "Optimizer steps of the falling half; as the rising half if negative."),
    (CYCLE_SECOND_STAIR_COUNT, int, -1, "Stairs of the falling half; as the rising half if negative."),
    (DECAY_STEP_SIZE, int, 1000, "Optimizer steps in one step of the decay after the cycle; 0 is no decay."),
    (CYCLE_MIN_LR, float, 0.01, "Learning rate at both ends of the cycle."),
    (CYCLE_MAX_LR, float, 0.1, "Learning rate at the top of the cycle."),
    (DECAY_LR_RATE, float, 0.0, "Decay of the learning rate per decay step."),
    (CYCLE_MIN_MOM, float, 0.8, "Momentum at the top of the cycle."),
    (CYCLE_MAX_MOM, float, 0.9, "Momentum at both ends of the cycle."),
    (DECAY_MOM_RATE, float, 0.0, "Change of the momentum per decay step."),
    (WARMUP_MIN_LR, float, 0.0, "Learning rate at which the warmup starts."),
    (WARMUP_MAX_LR, float, 0.001, "Learning rate at which the warmup ends."),
    (WARMUP_NUM_STEPS, int, 1000, "Optimizer steps of the warmup."),
    (WARMUP_TYPE, str, WARMUP_LOG_RATE, f"Shape of the warmup: {WARMUP_LOG_RATE} or {WARMUP_LINEAR_RATE}."),
    (WARMUP_MIN_RATIO, float, 0.01, "WarmupCosineLR: share of the learning rate at which the warmup starts."),
    (COS_MIN_RATIO, float, 0.01, "WarmupCosineLR: share of the learning rate at which the cosine ends."),
    (TOTAL_NUM_STEPS, int, None, "Optimizer steps of the whole training: WarmupDecayLR and WarmupCosineLR need it."),
)


def _flag(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and one option for every parameter of the five schedules; returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Learning-rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help=f"One of {', '.join(VALID_LR_SCHEDULES)}.")
    for name, kind, default, text in _FLAGS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    group.add_argument(
        f"--{LR_RANGE_TEST_STAIRCASE}", type=_flag, default=False, help="true: the range test grows in jumps."
    )
    group.add_argument(
        f"--{CYCLE_MOMENTUM}",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Whether momentum cycles as well; it does unless --no-cycle_momentum is given.",
    )
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The tuning arguments of this program's command line, and the arguments that are not among them."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(names: Iterable[str], args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy what the command line gives; None, and a negative count, mean that it was not given."""
    for name in names:
        value = getattr(args, name, None)
        if value is None or (name in _CYCLE_COUNTS and value < 0):
            continue
        params[name] = value


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the range test's arguments into `params`."""
    _override(_RANGE_TEST, args, params)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the 1-cycle arguments into `params`."""
    _override(_ONE_CYCLE, args, params)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the warmup arguments into `params`."""
    _override(_WARMUP, args, params)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the arguments of warmup and cosine into `params`."""
    _override(_COSINE, args, params)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the arguments of every schedule into `params`."""
    for names in _PARAMS.values():
        _override(names, args, params)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """A scheduler section made of the tuning arguments and None, or None and why there is no section."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a supported LR schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(_PARAMS[kind], args, params)
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The learning rate that a scheduler section names and an empty string, or None and why it names none."""
    for key in ("type", "params"):
        if config.get(key) is None:
            return None, f"LR schedule {key} not defined in config"
    kind = config["type"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule; it is not one of {', '.join(VALID_LR_SCHEDULES)}"
    if kind not in _LR:
        return None, f"{kind} multiplies the optimizer's own learning rate; its params name none"
    name, default = _LR[kind]
    rate = config["params"].get(name, default)
    return (None, f"{kind} is given no {name}") if rate is None else (rate, "")
