"""Optimizer updates as plain formulas in float64, for the optimizers whose elements do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

Options = Mapping[str, Any]
States = Mapping[str, Tensor]

_CLOSE = 2.0**-18
"""The rounding of a chain of float32 operations, as a part of the numbers that it sums."""


class Computed(NamedTuple):
    """A value and the size of the numbers that were summed for it, by which its rounding error is judged."""

    value: Tensor
    size: Tensor

    def differs(self, found: Tensor, eps: float) -> Tensor:
        """Where `found`, kept with a relative rounding of `eps`, is another value."""
        room = _CLOSE * self.size + 4 * eps * self.value.abs() + torch.finfo(torch.float32).tiny
        return ~((found.double() - self.value).abs() <= room)


Update = Callable[[Tensor, Tensor, States, int, Options], dict[str, Computed]]


def _adam(p: Tensor, g: Tensor, states: States, step: int, options: Options) -> dict[str, Computed]:
    lr, (beta1, beta2), decay = float(options["lr"]), options["betas"], options["weight_decay"]
    if options["decoupled"]:
        base, l2 = p * (1 - lr * decay), g
    else:
        base, l2 = p, g + decay * p
    m, v = states["exp_avg"], states["exp_avg_sq"]
    moment = beta1 * m + (1 - beta1) * l2
    terms = g.abs() + (0.0 if options["decoupled"] else decay) * p.abs()
    size = (beta1 * m).abs() + (1 - beta1) * terms
    square = beta2 * v + (1 - beta2) * l2 * l2
    corrected = options.get("bias_correction", True)
    first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    rate = lr / first / ((square / second).sqrt() + options["eps"])
    return {
        "exp_avg": Computed(moment, size),
        "exp_avg_sq": Computed(square, beta2 * v + (1 - beta2) * terms * terms),
        "parameter": Computed(base - rate * moment, 16 * rate.abs() * size),  # float32 powers in the corrections
    }


def _lion(p: Tensor, g: Tensor, states: States, step: int, options: Options) -> dict[str, Computed]:
    lr, (beta1, beta2), decay = float(options["lr"]), options["betas"], options["weight_decay"]
    m = states["exp_avg"]
    mixed, size = beta1 * m + (1 - beta1) * g, (beta1 * m).abs() + (1 - beta1) * g.abs()
    unsure = mixed.abs() <= _CLOSE * size  # rounding decides on the sign
    return {
        "exp_avg": Computed(beta2 * m + (1 - beta2) * g, (beta2 * m).abs() + (1 - beta2) * g.abs()),
        "parameter": Computed(p * (1 - lr * decay) - lr * mixed.sign(), lr + unsure * (2 * lr / _CLOSE)),
    }


def _adagrad(p: Tensor, g: Tensor, states: States, step: int, options: Options) -> dict[str, Computed]:
    g = g + options["weight_decay"] * p
    name = "sum" if "sum" in states else "exp_avg_sq"
    total = states[name] + g * g
    rate = float(options["lr"]) / (1 + (step - 1) * options.get("lr_decay", 0.0)) / (total.sqrt() + options["eps"])
    return {name: Computed(total, total), "parameter": Computed(p - rate * g, rate * g.abs())}


def _sgd(p: Tensor, g: Tensor, states: States, step: int, options: Options) -> dict[str, Computed]:
    momentum, found = options["momentum"], {}
    g = g + options["weight_decay"] * p
    if momentum:
        known = states.get("momentum_buffer")
        moved = g if known is None else momentum * known + (1 - options["dampening"]) * g
        found["momentum_buffer"] = Computed(moved, g.abs() if known is None else (momentum * known).abs() + g.abs())
        g = g + momentum * moved if options["nesterov"] else moved
    lr = float(options["lr"])
    return {**found, "parameter": Computed(p - lr * g, lr * g.abs())}


@dataclass(frozen=True)
class Formula:
    """One update rule: the moments it keeps and what it makes of a parameter."""

    update: Update
    moments: tuple[str, ...]
    zeros: bool = True
    """Moments that do not exist yet are zeros."""
    counts: bool = True
    """It depends on the number of the step."""


FORMULAS = {
    "adam": Formula(_adam, ("exp_avg", "exp_avg_sq")),
    "lion": Formula(_lion, ("exp_avg",), counts=False),
    "adagrad": Formula(_adagrad, ("sum",)),
    "cpu_adagrad": Formula(_adagrad, ("exp_avg_sq",)),
    "sgd": Formula(_sgd, ("momentum_buffer",), zeros=False, counts=False),
}
"""By the names that records of steps carry."""

_CLASSES: dict[type[Optimizer], str] = {
    Adam: "adam",
    AdamW: "adam",
    FusedAdam: "adam",
    DeepSpeedCPUAdam: "adam",
    FusedLion: "lion",
    DeepSpeedCPULion: "lion",
    Adagrad: "adagrad",
    DeepSpeedCPUAdagrad: "cpu_adagrad",
    SGD: "sgd",
}


def formula_of(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The name of the formula of a parameter group, and its numbers; None where there is none."""
    name = _CLASSES.get(type(optimizer))
    if name is None or group.get("amsgrad"):
        return None
    options = {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params" and isinstance(value, (Tensor, float, int, bool, tuple))
    }
    own = getattr(optimizer, "adam_w_mode", isinstance(optimizer, AdamW))
    options["decoupled"] = bool(group.get("decoupled_weight_decay", own))
    if name == "sgd" and not options.get("momentum"):
        return name, {**options, "momentum": 0.0}
    return name, options


def updated(
    name: str, master: Tensor, gradient: Tensor, states: States, step: int, options: Options
) -> dict[str, Computed]:
    """The parameter and its moments after a step; `step` counts from 1."""
    formula, p = FORMULAS[name], master.double()
    g = -gradient.double() if options.get("maximize") else gradient.double()
    known = {key: value.double() for key, value in states.items()}
    if formula.zeros:
        known = {key: known.get(key, torch.zeros_like(p)) for key in formula.moments}
    return formula.update(p, g, known, step, options)
