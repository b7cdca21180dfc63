"""The `optimizer` and `scheduler` sections, and the parameter names that each DeepSpeed type takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from .model import Section

__all__ = [
    "ONE_BIT_OPTIMIZERS",
    "OPTIMIZER_PARAMS",
    "OPTIMIZER_TYPES",
    "SCHEDULER_PARAMS",
    "SCHEDULER_REQUIRED",
    "SCHEDULER_TYPES",
    "OptimizerConfig",
    "SchedulerConfig",
]

OPTIMIZER_TYPES: tuple[str, ...] = (
    "Adam",
    "AdamW",
    "Adagrad",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
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
        *("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "amsgrad"),
        *("cuda_aware", "comm_backend_name"),
    }
)

OPTIMIZER_PARAMS: Mapping[str, frozenset[str] | None] = MappingProxyType(
    {
        "adam": _ADAM,
        "adamw": _ADAM,
        "adagrad": _ADAGRAD,
        "lamb": _LAMB,
        "lion": _LION,
        "muon": _MUON,
        "onebitadam": _ONE_BIT | {"freeze_step"},
        "zerooneadam": _ONE_BIT | {"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"},
        "onebitlamb": _ONE_BIT
        | {"freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"},
        "muadam": None,
        "muadamw": None,
        "musgd": None,
    }
)
"""Lower-case optimizer type -> the parameter names it takes; None where the package `mup` decides."""

_WARMUP = frozenset({"warmup_num_steps", "warmup_type", "last_batch_iteration"})

SCHEDULER_PARAMS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
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
)
"""Scheduler type -> the parameter names it takes."""

SCHEDULER_REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "WarmupDecayLR": frozenset({"total_num_steps"}),
        "WarmupCosineLR": frozenset({"total_num_steps"}),
        "OneCycle": frozenset({"cycle_min_lr", "cycle_max_lr"}),
    }
)
"""Scheduler type -> the parameters that have no default."""

SCHEDULER_TYPES: tuple[str, ...] = tuple(SCHEDULER_PARAMS)
"""Our own scheduler names, exact case; any other type is the name of a torch.optim.lr_scheduler class."""

_CANONICAL = {name.lower(): name for name in OPTIMIZER_TYPES}


class _Missing:
    """Stands for a type that is not given, so that the error is told at the key `type`."""


def _given(value: Any) -> Any:
    if isinstance(value, _Missing):
        raise ValueError("missing, although params are given; name the class, or remove params")
    return value


def _canonical(value: Any) -> Any:
    return _CANONICAL.get(value.lower(), value) if isinstance(value, str) else value


def _mark_missing_type(data: Any) -> Any:
    if isinstance(data, dict) and data.get("params") and data.get("type") is None:
        return {**data, "type": _Missing()}
    return data


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


_Params = Annotated[dict[str, Any], BeforeValidator(_empty_if_null)]


class OptimizerConfig(Section):
    """Which optimizer to build; an optimizer handed to `initialize` takes precedence."""

    type: Annotated[str | None, BeforeValidator(_canonical), BeforeValidator(_given)] = Field(
        None,
        description=f"Optimizer to build: {', '.join(OPTIMIZER_TYPES)} (any case), or the exact name of a "
        "torch.optim class.",
    )
    params: _Params = Field({}, description="Keyword arguments of the optimizer, such as lr and weight_decay.")
    legacy_fusion: bool = Field(
        False, description="No effect: every optimizer takes the same step path; accepted for old configs."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_type(cls, data: Any) -> Any:
        return _mark_missing_type(data)

    @model_validator(mode="after")
    def _rules(self) -> OptimizerConfig:
        if "max_grad_norm" in self.params:
            raise ValueError(
                f"params.max_grad_norm ({self.params['max_grad_norm']}) is not an optimizer parameter; "
                "set the top-level key gradient_clipping instead"
            )
        return self


class SchedulerConfig(Section):
    """Which learning-rate schedule to build; a scheduler handed to `initialize` takes precedence."""

    type: Annotated[str | None, BeforeValidator(_given)] = Field(
        None,
        description=f"Schedule to build: {', '.join(SCHEDULER_TYPES)}, or the exact name of a "
        "torch.optim.lr_scheduler class.",
    )
    params: _Params = Field({}, description="Keyword arguments of the schedule; step counts are in optimizer steps.")

    @model_validator(mode="before")
    @classmethod
    def _has_type(cls, data: Any) -> Any:
        return _mark_missing_type(data)
