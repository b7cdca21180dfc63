"""The `optimizer`, `scheduler` and `optimizer_in_backward` sections, and the parameters that each type takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any

from pydantic import BeforeValidator

from deepspeed.config.clean import ConfigProblem, nearest

from .model import NoEffect, Section, key, no_effect

OPTIMIZER_TYPES: tuple[str, ...] = (
    *("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon"),
    *("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD"),
)
"""Our own optimizer names, matched without regard to case; any other type is the exact name of a torch.optim class."""

ONE_BIT_OPTIMIZERS = frozenset({"OneBitAdam", "ZeroOneAdam", "OneBitLamb"})

_ADAM = frozenset(
    {
        *("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "set_grad_none"),
        *("torch_adam", "adam_w_mode", "fp32_optimizer_states", "moment_bits"),
        # These reach torch.optim.Adam and AdamW when torch_adam is true.
        *("foreach", "fused", "maximize", "capturable", "differentiable"),
    }
)
_ADAGRAD = frozenset(
    {
        *("lr", "eps", "weight_decay", "amsgrad", "fp32_optimizer_states", "moment_bits"),
        # These reach torch.optim.Adagrad when the optimizer is not offloaded.
        *("lr_decay", "initial_accumulator_value", "foreach", "fused", "maximize", "differentiable"),
    }
)
_LAMB = frozenset(
    {
        *("lr", "betas", "eps", "eps_inside_sqrt", "weight_decay", "bias_correction", "amsgrad"),
        *("max_coeff", "min_coeff", "moment_bits"),
    }
)
_LION = frozenset({"lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states", "moment_bits"})
_MUON = frozenset(
    {
        *("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method"),
        *("adam_w_mode", "torch_adam", "fp32_optimizer_states", "moment_bits", "per_head_muon"),
    }
)
_ONE_BIT = frozenset(
    {
        *("lr", "betas", "eps", "eps_inside_sqrt", "weight_decay", "bias_correction", "amsgrad"),
        *("cuda_aware", "comm_backend_name"),
    }
)
OPTIMIZER_PARAMS: Mapping[str, frozenset[str] | None] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": _ADAGRAD,
    "lamb": _LAMB,
    "lion": _LION,
    "muon": _MUON,
    "onebitadam": _ONE_BIT | {"freeze_step"},
    "onebitlamb": _ONE_BIT
    | {"freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"},
    "zerooneadam": _ONE_BIT | {"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"},
    **dict.fromkeys(("muadam", "muadamw", "musgd")),
}
"""Lower-case optimizer type -> the parameter names it takes; None where `mup` decides."""

_WARMUP = frozenset({"warmup_num_steps", "warmup_type", "last_batch_iteration"})

SCHEDULER_PARAMS: Mapping[str, frozenset[str]] = {
    "WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": _WARMUP | {"total_num_steps", "warmup_min_lr", "warmup_max_lr"},
    "WarmupCosineLR": _WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"},
    "LRRangeTest": frozenset(
        {
            *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
            *("lr_range_test_staircase", "last_batch_iteration"),
        }
    ),
    "OneCycle": frozenset(
        {
            *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size"),
            *("cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count"),
            *("decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
            "last_batch_iteration",
        }
    ),
}
"""Scheduler type -> the parameter names it takes."""

SCHEDULER_REQUIRED: Mapping[str, frozenset[str]] = {
    "WarmupDecayLR": frozenset({"total_num_steps"}),
    "WarmupCosineLR": frozenset({"total_num_steps"}),
    "OneCycle": frozenset({"cycle_min_lr", "cycle_max_lr"}),
}
"""Scheduler type -> the parameters that have no default."""

SCHEDULER_TYPES: tuple[str, ...] = tuple(SCHEDULER_PARAMS)
"""Our own scheduler names, exact case; any other type is the name of a torch.optim.lr_scheduler class."""

_CANONICAL = {name.lower(): name for name in OPTIMIZER_TYPES}


def _canonical(value: Any) -> Any:
    return _CANONICAL.get(value.lower(), value) if isinstance(value, str) else value


_Params = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class OptimizerConfig(Section):
    """Which optimizer to build; an optimizer handed to `initialize` takes precedence."""

    type: Annotated[str | None, BeforeValidator(_canonical)] = key(
        None,
        f"Optimizer to build: {', '.join(OPTIMIZER_TYPES)} (any case), or the exact name of a torch.optim class.",
    )
    params: _Params = key({}, "Keyword arguments of the optimizer, such as lr and weight_decay.")
    legacy_fusion: bool = no_effect(False, "every optimizer takes the same step path")


class SchedulerConfig(Section):
    """Which learning-rate schedule to build; a scheduler handed to `initialize` takes precedence."""

    type: str | None = key(
        None, f"Schedule to build: {', '.join(SCHEDULER_TYPES)}, or the exact name of a torch.optim.lr_scheduler class."
    )
    params: _Params = key({}, "Keyword arguments of the schedule; step counts are in optimizer steps.")


class OptimizerInBackwardConfig(Section):
    """Whether gradients are used up as they come, so that they never exist all at once."""

    enabled: bool = key(
        False, "Whether each parameter is updated, and its gradient freed, during the last backward of a step."
    )
    clip_by_last_norm: bool = key(
        False,
        "Whether gradient_clipping acts by the norm of the step before: its own is known too late.",
        NoEffect("gradient_clipping is 0", lambda c: c.gradient_clipping <= 0),
    )


REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What constructors, torch's among them, raise when they cannot take a value."""

# How client libraries call what the classes call otherwise.
_SYNONYMS = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "warmup_steps": "warmup_num_steps",
    "num_warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
}

# What the library passes itself; naming it in the config is an error.
_PASSED = frozenset({"self", "params", "optimizer"})


def check_optimizer(section: Mapping[str, Any], autos: Iterable[str]) -> list[ConfigProblem]:
    """Problems of an optimizer section as given (a dict with `type` and `params`)."""
    return _check("optimizer", section, autos, OPTIMIZER_PARAMS, ("torch.optim", "Optimizer"))


def check_scheduler(section: Mapping[str, Any], autos: Iterable[str]) -> list[ConfigProblem]:
    """Problems of a scheduler section as given (a dict with `type` and `params`)."""
    return _check("scheduler", section, autos, SCHEDULER_PARAMS, ("torch.optim.lr_scheduler", "LRScheduler"))


def _check(
    name: str,
    section: Mapping[str, Any],
    autos: Iterable[str],
    own_params: Mapping[str, frozenset[str] | None],
    torch_base: tuple[str, str],
) -> list[ConfigProblem]:
    """`torch_base` is the module of torch that has other classes, and their base class."""
    kind, params = section.get("type"), section.get("params")
    if kind is None and isinstance(params, Mapping) and params:
        return [ConfigProblem(f"{name}.type", "missing, although params are given; name the class, or remove params")]
    if not isinstance(kind, str) or (params is not None and not isinstance(params, Mapping)):
        return []  # the schema says what is wrong with the value
    prefix = f"{name}.params."
    given = {*(params or ()), *(path.removeprefix(prefix) for path in autos if path.startswith(prefix))}
    own = own_params.get(kind if kind in own_params else kind.lower(), frozenset())
    if own is None:
        return []  # another package's class, which knows its own parameters; or one that is refused
    known, required = set(own), set(SCHEDULER_REQUIRED.get(kind, ()))
    if not known:
        module = importlib.import_module(torch_base[0])
        base = getattr(module, torch_base[1])
        found = getattr(module, kind, None)
        if not (inspect.isclass(found) and issubclass(found, base)):
            own_types = OPTIMIZER_TYPES if name == "optimizer" else SCHEDULER_TYPES
            return [_no_such_type(name, kind, own_types, module, base)]
        parameters = inspect.signature(found.__init__).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return []
        known = set(parameters) - _PASSED
        required = {key for key in known if parameters[key].default is inspect.Parameter.empty}
    return [
        *(_no_such_param(prefix, key, kind, known) for key in sorted(given - known)),
        *(ConfigProblem(f"{prefix}{key}", f"{kind} needs it, and it is not given") for key in sorted(required - given)),
    ]


def _no_such_param(prefix: str, key: str, kind: str, known: set[str]) -> ConfigProblem:
    meant = _SYNONYMS[key] if _SYNONYMS.get(key) in known else nearest(key, known)
    advice = f"it takes {', '.join(sorted(known))}" if meant is None else f"did you mean {meant!r}?"
    return ConfigProblem(f"{prefix}{key}", f"{kind} has no such parameter; {advice}")


def _no_such_type(name: str, kind: str, own: Sequence[str], module: ModuleType, base: type) -> ConfigProblem:
    classes = {key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}
    meant = nearest(kind, {*own, *classes} - {base.__name__})
    advice = f"use one of {', '.join(own)} or a class of {module.__name__}"
    if meant is not None:
        advice = f"did you mean {meant!r}?"
    return ConfigProblem(f"{name}.type", f"no {name} is called {kind!r}; {advice}")
