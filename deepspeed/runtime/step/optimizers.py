"""From the `optimizer` section of the config to the optimizer object."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from deepspeed.config.optimizer import REFUSALS, OptimizerConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist_once
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon.aux_adam import ADAM_DEFAULTS, MUON_DEFAULTS, MuonWithAuxAdam
from deepspeed.ops.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from deepspeed.ops.optimizer import BatchOptimizer
from deepspeed.precision.cast import short
from deepspeed.precision.policy import Precision

TESTED_WITH_ZERO: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    FusedLion,
    MuonWithAuxAdam,
    OnebitAdam,
    OnebitLamb,
    ZeroOneAdam,  # which is refused with a reason of its own
)
"""The exact types that ZeRO takes without `zero_allow_untested_optimizer`."""

# Parts of class names, in lower case → what an optimizer of that name computes of more than single elements.
_OF_WHOLE_PARAMETERS: Mapping[str, str] = {
    "lamb": "the norm of each whole parameter and of its update",
    "lars": "the norm of each whole parameter and of its gradient",
    "adafactor": "means over rows and columns, and norms of whole parameters",
    "muon": "with whole matrices",
    "lbfgs": "products over all parameters",
}

# Where a class has no switch for what it does anyway, naming that very thing is no mistake.
_IMPLIED: Mapping[str, Any] = {
    "amsgrad": False,
    "bias_correction": True,
    "capturable": False,
    "differentiable": False,
    "foreach": None,
    "fused": None,
    "maximize": False,
    "set_grad_none": True,
}

_MUP_TYPES = ("MuAdam", "MuAdamW", "MuSGD")
_MUON_KEYS = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
_RATES = ("muon_lr", "adam_lr")
_MUON_VALUES: Mapping[str, Any] = {**MUON_DEFAULTS, **ADAM_DEFAULTS, **dict.fromkeys(_RATES, 0.0)}
_NOT_MATRICES = ("embed", "lm_head")


def is_tested_with_zero(optimizer: torch.optim.Optimizer) -> bool:
    """True for the exact types of TESTED_WITH_ZERO and for Apex's FusedAdam."""
    kind = type(optimizer)
    return kind in TESTED_WITH_ZERO or (kind.__name__ == "FusedAdam" and kind.__module__.partition(".")[0] == "apex")


def require_tested(optimizer: torch.optim.Optimizer, *, allowed: bool) -> None:
    """Refuse an optimizer of which it is not known that it works over shards, or warn of one that is `allowed`.

    The key that allows it may not be the user's own: clients set it for every optimizer that they pass.
    """
    if not is_tested_with_zero(optimizer):
        kind, names = type(optimizer).__name__, ", ".join(sorted({kind.__name__ for kind in TESTED_WITH_ZERO}))
        given = "ZeRO gives an optimizer this rank's part of each parameter as a 1-D tensor"
        whole = next((what for name, what in _OF_WHOLE_PARAMETERS.items() if name in kind.lower()), None)
        if allowed:
            if whole is not None:
                log_dist_once(
                    f"zero_allow_untested_optimizer: {kind} computes {whole}, and {given}: its numbers differ from "
                    "those without ZeRO, and change with the number of ranks. With zero_optimization.stage 0 they do "
                    "not.",
                    level=WARNING,
                )
            return
        if whole is not None:
            why = (
                f"{kind} computes {whole}, and {given}: its numbers would change with the number of ranks. Use a "
                "tested optimizer or zero_optimization.stage 0; set the key to true only if that is acceptable."
            )
        else:
            why = (
                f"{kind} was not tested with ZeRO. {given}. If it works element by element, set the key to true; if it "
                "computes norms or means of whole parameters, its numbers would change with the number of ranks."
            )
        raise DeepSpeedConfigError(
            f"zero_allow_untested_optimizer: {why} Tested are {names}.", path="zero_allow_untested_optimizer"
        )


def hold_states(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Have the moments held as `precision` says; refuse an optimizer that would hold them otherwise.

    Those of other libraries make moments in the dtype of what they update, the masters.
    """
    told = isinstance(optimizer, BatchOptimizer) and optimizer.hold_states(precision.state)
    if not told and precision.state != precision.master:
        master, state = short(precision.master), short(precision.state)
        key = f"{master}.{master}_master_weights_and_grads"
        raise DeepSpeedConfigError(
            f"{key}: {type(optimizer).__name__} would hold its moments in {master}, the dtype of the masters, in place "
            f"of {state}. Use Adam or Lion of this library (optimizer.type), or set the key to false.",
            path=key,
        )


@dataclass(frozen=True, slots=True)
class _OptimizerRequest:
    """What is to be built: the params of the section are taken out one by one."""

    kind: str
    params: dict[str, Any]
    parameters: list[Any]
    names: Mapping[int, str] = field(default_factory=dict)
    offloaded: bool = False
    bf16_states: bool = False

    def flag(self, key: str, default: bool) -> bool:
        """Take a switch out of the params."""
        value = self.params.pop(key, default)
        if value not in (True, False):  # and 1 and 0, which are equal to them
            raise _wrong(key, f"is {value!r}; it must be true or false")
        return bool(value)


def build_optimizer(
    section: OptimizerConfig,
    parameters: Iterable[Any],
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    offloaded: bool = False,
    bf16_states: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer that the section names, over a list of parameters or of parameter groups.

    Muon needs the names. `offloaded`: the parameters to update are in host memory. `bf16_states`: the moments of
    an offloaded optimizer have the dtype of the parameters.
    """
    if section.type is None:
        raise DeepSpeedConfigError("optimizer.type is missing; name the class to build", path="optimizer.type")
    names = {id(param): name for name, param in named_parameters or ()}
    order = _OptimizerRequest(section.type, dict(section.params), list(parameters), names, offloaded, bf16_states)
    if section.type in ("Adam", "AdamW"):
        kind, _, arguments = _adam(order)
        return _built(order, kind, {**order.params, **arguments})
    if section.type == "Muon":
        return _muon(order)
    return _built(order, _class(order), order.params)


def _wrong(key: str, found: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(f"optimizer.params.{key} {found}", path=f"optimizer.params.{key}")


def _adam(order: _OptimizerRequest) -> tuple[type[torch.optim.Optimizer], bool, dict[str, Any]]:
    """Which of the Adams, whether its weight decay is decoupled, and the arguments that go with the choice."""
    # "Adam" decays like AdamW too, unless told otherwise.
    decoupled = order.flag("adam_w_mode", True) or order.kind == "AdamW"
    wide_states = order.flag("fp32_optimizer_states", True) and not order.bf16_states
    if order.flag("torch_adam", False):
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), decoupled, {}
    if order.offloaded:
        return DeepSpeedCPUAdam, decoupled, {"adamw_mode": decoupled, "fp32_optimizer_states": wide_states}
    return FusedAdam, decoupled, {"adam_w_mode": decoupled}


def _class(order: _OptimizerRequest) -> Any:
    """The class of every type that needs no more than a choice of one."""
    own = {"Lamb": FusedLamb, "OneBitAdam": OnebitAdam, "OneBitLamb": OnebitLamb, "ZeroOneAdam": ZeroOneAdam}
    if order.kind in own:
        return own[order.kind]
    if order.kind in ("Lion", "Adagrad") and order.offloaded:
        if order.bf16_states:
            order.params["fp32_optimizer_states"] = False
        return DeepSpeedCPULion if order.kind == "Lion" else DeepSpeedCPUAdagrad
    if order.kind in ("Lion", "Adagrad"):
        order.flag("fp32_optimizer_states", True)  # only the classes for host memory choose
    if order.kind == "Lion":
        return FusedLion
    if order.kind in _MUP_TYPES:
        return _from_mup(order.kind)
    found = getattr(torch.optim, order.kind, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        raise DeepSpeedConfigError(
            f"optimizer.type is {order.kind!r}; it must be one of Adam, AdamW, Adagrad, Lamb, Lion, Muon (any case) or "
            "the exact name of a torch.optim class",
            path="optimizer.type",
        )
    return found


def _from_mup(kind: str) -> Any:
    try:
        return getattr(importlib.import_module("mup"), kind)
    except ImportError as error:
        raise DeepSpeedConfigError(
            f"optimizer.type is {kind}, which is of the package mup, and mup cannot be imported ({error}); "
            "install it with: pip install mup",
            path="optimizer.type",
        ) from error


def _built(order: _OptimizerRequest, kind: Any, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Construct, telling errors at the key they come from."""
    if order.kind in _MUP_TYPES:
        accepted = dict(arguments)  # plain functions there, which hand on whatever they are given
    else:
        accepted = dict(_accepted(order, kind, arguments))
    try:
        made: torch.optim.Optimizer = kind(order.parameters, **accepted)
    except REFUSALS as error:
        raise DeepSpeedConfigError(
            f"optimizer.params: {kind.__name__}, which optimizer.type {order.kind} chose, refused them: {error}",
            path="optimizer.params",
        ) from error
    return made


def _accepted(order: _OptimizerRequest, kind: type, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that the class takes; an error for one that would have no effect."""
    known = inspect.signature(kind).parameters
    for key, value in arguments.items():
        if key in known:
            _check_kind(key, value, known[key].default)
            yield key, tuple(value) if key == "betas" and isinstance(value, list) else value
        elif key not in _IMPLIED or value != _IMPLIED[key]:
            takes = ", ".join(list(known)[1:])
            raise _wrong(key, f"is {value!r}: {kind.__name__}, which type {order.kind} chose, takes only {takes}")


def _check_kind(key: str, value: Any, default: Any) -> None:
    """Refuse a value of another kind than the parameter's default; classes take some of them and fail in a step."""
    if isinstance(default, bool):
        if value not in (True, False):  # and 1 and 0, which are equal to them
            raise _wrong(key, f"is {value!r}; it must be true or false")
    elif isinstance(default, (int, float)):
        if not _is_number(value):
            raise _wrong(key, f"is {value!r}; it must be a number")
    elif isinstance(default, tuple):
        numbers = value if isinstance(value, (list, tuple)) and len(value) == len(default) else ("none",)
        if not all(_is_number(each) or (each is None and None in default) for each in numbers):
            raise _wrong(key, f"is {value!r}; it must be a list of {len(default)} numbers")


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (Real, Tensor))


def _muon(order: _OptimizerRequest) -> torch.optim.Optimizer:
    """Matrices of hidden layers to Muon, everything else to Adam."""
    adam, decoupled, arguments = _adam(order)
    per_head = order.flag("per_head_muon", False)
    bits = order.params.pop("moment_bits", None)
    if bits is not None and adam is not FusedAdam:
        raise _wrong(
            "moment_bits",
            f"is {bits!r}, but the Adam half of Muon is {adam.__name__}, by zero_optimization.offload_optimizer or "
            "torch_adam, and holds its own moments; remove the key",
        )
    unknown = sorted(order.params.keys() - {*_MUON_KEYS, *_ADAM_KEYS, *_RATES})
    if unknown:
        raise _wrong(unknown[0], f"is {order.params[unknown[0]]!r}: Muon has no such parameter")
    for key, value in order.params.items():
        _check_kind(key, value, _MUON_VALUES.get(key) if value is not None or key not in _RATES else None)
    groups = [half for group in _groups(order) for half in _halves(order, group, per_head)]
    if per_head and not any("num_heads" in group for group in groups):
        raise _wrong(
            "per_head_muon",
            "is true, but no parameter of the Muon half is an attention projection of a known number of heads; set "
            "muon_num_heads on the projection weights (deepspeed.ops.muon.tag_attention_heads does it from "
            "model.config), or remove the key",
        )
    try:
        # FusedAdam would do what the optimizer does by itself.
        inline = adam is FusedAdam
        return MuonWithAuxAdam(
            groups,
            adam_optimizer=None if inline else adam,
            adam_optimizer_kwargs=None if inline else arguments,
            adam_w_mode=decoupled,
            moment_bits=bits,
        )
    except REFUSALS as error:
        raise DeepSpeedConfigError(f"optimizer.params: Muon refused them: {error}", path="optimizer.params") from error


def _groups(order: _OptimizerRequest) -> list[dict[str, Any]]:
    if order.parameters and all(isinstance(each, dict) for each in order.parameters):
        return order.parameters
    return [{"params": order.parameters}]


def _halves(order: _OptimizerRequest, group: Mapping[str, Any], per_head: bool) -> Iterator[dict[str, Any]]:
    """The group cut in two, or more where heads differ; its own values win over those of the config."""
    halves: dict[tuple[bool, int | None], list[Any]] = {}
    members = group["params"]
    if not isinstance(group.get("use_muon", True), bool):
        raise DeepSpeedConfigError(
            f"use_muon of a parameter group is {group['use_muon']!r}; it must be true or false. Or leave it out: "
            "matrices of hidden layers go to Muon then",
            path="optimizer.type",
        )
    for member in [members] if isinstance(members, Tensor) else members:
        name, param = member if isinstance(member, tuple) else (order.names.get(id(member)), member)
        matrix = group["use_muon"] if "use_muon" in group else _is_matrix(name, param)
        heads = getattr(param, "muon_num_heads", None) if per_head and matrix else None
        halves.setdefault((bool(matrix), heads), []).append(member)
    for (matrix, heads), chosen in sorted(halves.items(), key=lambda item: (not item[0][0], item[0][1] or 0)):
        own, shared = dict(group), dict(order.params)
        for values in (shared, own):
            rates = {True: values.pop("muon_lr", None), False: values.pop("adam_lr", None)}
            if rates[matrix] is not None:
                values["lr"] = rates[matrix]
        keys, others = (_MUON_KEYS, _ADAM_KEYS) if matrix else (_ADAM_KEYS, _MUON_KEYS)
        half = {key: value for key, value in shared.items() if key in keys}
        half.update({key: value for key, value in own.items() if key in keys or key not in others})
        if isinstance(half.get("betas"), list):
            half["betas"] = tuple(half["betas"])
        if heads is not None:
            half["num_heads"] = heads
        yield {**half, "params": chosen, "use_muon": matrix}


def _is_matrix(name: str | None, param: Tensor) -> bool:
    """True if the parameter goes to Muon; its own mark `use_muon` decides, else its dims and its name."""
    marked = getattr(param, "use_muon", None)
    if marked is not None:
        return bool(marked)
    shape = tuple(getattr(param, "ds_shape", param.shape))  # a sharded parameter has no dims of its own
    if len(shape) < 2:
        return False
    if name is None:
        raise DeepSpeedConfigError(
            f"optimizer.type is Muon, and a parameter of shape {shape} has no name to tell whether it is an embedding; "
            "mark it with param.use_muon = True or False, put use_muon into its parameter group, or let the engine "
            "use parameters of the model",
            path="optimizer.type",
        )
    return not any(part in name.lower() for part in _NOT_MATRICES)
