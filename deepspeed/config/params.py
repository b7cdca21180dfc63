"""The `type` and `params` of the optimizer and scheduler sections: does the class exist, does it take these names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.config.clean import Problem
from deepspeed.config.names import nearest
from deepspeed.config.optimizer import (
    OPTIMIZER_PARAMS,
    OPTIMIZER_TYPES,
    SCHEDULER_PARAMS,
    SCHEDULER_REQUIRED,
    SCHEDULER_TYPES,
)

__all__ = ["REFUSALS", "check_optimizer", "check_scheduler"]

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


def check_optimizer(section: Mapping[str, Any], autos: Iterable[str]) -> list[Problem]:
    """Problems of an optimizer section as given (a dict with `type` and `params`)."""
    return _check("optimizer", section, autos, OPTIMIZER_TYPES, OPTIMIZER_PARAMS, "torch.optim", "Optimizer")


def check_scheduler(section: Mapping[str, Any], autos: Iterable[str]) -> list[Problem]:
    """Problems of a scheduler section as given (a dict with `type` and `params`)."""
    return _check(
        "scheduler", section, autos, SCHEDULER_TYPES, SCHEDULER_PARAMS, "torch.optim.lr_scheduler", "LRScheduler"
    )


def _check(
    name: str,
    section: Mapping[str, Any],
    autos: Iterable[str],
    own_types: Iterable[str],
    own_params: Mapping[str, frozenset[str] | None],
    torch_module: str,
    torch_base: str,
) -> list[Problem]:
    kind, params = section.get("type"), section.get("params")
    if not isinstance(kind, str) or (params is not None and not isinstance(params, Mapping)):
        return []  # the schema says what is wrong with the value
    prefix = f"{name}.params."
    given = {*(params or ()), *(path.removeprefix(prefix) for path in autos if path.startswith(prefix))}
    spelled = kind if kind in own_params else kind.lower()
    own = own_params.get(spelled, frozenset())
    if own is None:
        return []  # another package's class, which knows its own parameters
    known, required = set(own), set(SCHEDULER_REQUIRED.get(kind, ()))
    if not known:
        parameters = _signature(torch_module, kind, torch_base)
        if parameters is None:
            return [_no_such_type(name, kind, own_types, torch_module, torch_base)]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return []
        known = set(parameters) - _PASSED
        required = {key for key in known if parameters[key].default is inspect.Parameter.empty}
    return [
        *(_no_such_param(prefix, key, kind, known) for key in sorted(given - known)),
        *(Problem(f"{prefix}{key}", f"{kind} needs it, and it is not given") for key in sorted(required - given)),
    ]


def _no_such_param(prefix: str, key: str, kind: str, known: set[str]) -> Problem:
    meant = _SYNONYMS[key] if _SYNONYMS.get(key) in known else nearest(key, known)
    if meant is not None:
        return Problem(f"{prefix}{key}", f"{kind} has no such parameter; did you mean {meant!r}?")
    return Problem(f"{prefix}{key}", f"{kind} has no such parameter; it takes {', '.join(sorted(known))}")


def _no_such_type(name: str, kind: str, own: Iterable[str], torch_module: str, torch_base: str) -> Problem:
    module = importlib.import_module(torch_module)
    base = getattr(module, torch_base)
    classes = {key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}
    meant = nearest(kind, {*own, *classes} - {torch_base})
    if meant is not None:
        return Problem(f"{name}.type", f"no {name} is called {kind!r}; did you mean {meant!r}?")
    return Problem(
        f"{name}.type", f"no {name} is called {kind!r}; use one of {', '.join(own)} or a class of {torch_module}"
    )


def _signature(module_name: str, kind: str, base_name: str) -> Mapping[str, inspect.Parameter] | None:
    """The constructor's parameters of a torch class, or None if torch has no such class."""
    module = importlib.import_module(module_name)
    found = getattr(module, kind, None)
    if not (inspect.isclass(found) and issubclass(found, getattr(module, base_name))):
        return None
    return inspect.signature(found.__init__).parameters
