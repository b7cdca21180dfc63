"""Whether a module computes what is expected of it: tried on small numbers, with a stand-in for its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["alike", "attempt", "overridden", "same", "stand_in"]

# What code that was not written for a stand-in can raise.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def stand_in(module: nn.Module, tensors: Mapping[str, Tensor], children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with other parameters and submodules, whose forward can be tried wherever the module's weights are."""
    made = copy.copy(module)
    made.__dict__["_parameters"] = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    made.__dict__["_modules"] = {**module._modules, **children}
    return made


def overridden(module: nn.Module) -> str | None:
    """Why a module's class does not tell what it computes; None if it does."""
    own = module.__dict__.get("forward")
    of_class = own is None or getattr(own, "__func__", None) is type(module).forward  # as modules that were pickled
    return None if of_class else "its forward was replaced on the instance"


def attempt(computed: Callable[[], Any]) -> Any:
    """What code gives; None where it does not run."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return computed()
    except _FAILURES:
        return None


def same(forward: Callable[..., Any], twin: nn.Module, x: Tensor, expected: Any) -> bool:
    """Whether a stand-in gives what is expected of x both in training, where some drop numbers, and in evaluation."""
    modes = {module: module.training for module in twin.modules()}

    def computed(training: bool) -> Any:
        for module in modes:
            module.training = training
        return forward(twin, x)

    try:
        return all(alike(partial(computed, training), expected) for training in (True, False))
    finally:
        for module, mode in modes.items():  # some belong to the model
            module.training = mode


def alike(computed: Callable[[], Any], expected: Any) -> bool:
    """Whether code runs and gives what is expected, to rounding."""
    found = attempt(computed)
    if found is None:
        return False
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else ((found, expected),)
    return isinstance(found, (Tensor, tuple)) and all(
        isinstance(one, Tensor) and one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in pairs
    )
