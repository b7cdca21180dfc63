"""Whether a module computes what is expected of it: tried on small numbers, with a stand-in for its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

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


FORWARD = nn.Linear.forward


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes what torch's does, and nobody sees or changes what goes in and out of it."""
    return unwatched(layer) and nn.Linear.forward is FORWARD and overridden(layer) is None


def unwatched(layer: nn.Module) -> bool:
    """Whether a layer is of torch's class, and nobody sees or changes what goes in and out of it."""
    return (
        type(layer) is nn.Linear
        and layer._compiled_call_impl is None
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def only_ours(module: nn.Module) -> bool:
    """Whether nobody but this library sees or changes what goes in and out of a module, forward and backward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return module._compiled_call_impl is None and all(
        str(getattr(hook, "__module__", "")).startswith("deepspeed.") for some in hooks for hook in some.values()
    )


def watched_everywhere() -> bool:
    """Whether somebody has a hook on all modules there are."""
    return bool(torch_module._has_any_global_hook())


def differentiated(x: Any) -> bool:
    """Whether x is an ordinary tensor whose gradient will be computed."""
    return ordinary(x) and torch.is_grad_enabled() and x.requires_grad


def ordinary(x: Any) -> bool:
    """Whether x is a plain tensor that layers compute with in the dtype it has; no inference tensor with gradients."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.is_floating_point()
        and not (x.is_inference() and torch.is_grad_enabled())
        and not torch._C._are_functorch_transforms_active()
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
    )


def fits(layer: nn.Linear, x: Tensor, width: int | None = None) -> bool:
    """Whether a layer's parameters are here, whole and of x's dtype, and take rows of x's width or of this one."""
    shapes = ((layer.weight, (layer.out_features, layer.in_features)), (layer.bias, (layer.out_features,)))
    return layer.in_features == (x.shape[-1] if width is None else width) and all(
        _is_ordinary(param) and param.shape == shape and (param.dtype, param.device) == (x.dtype, x.device)
        for param, shape in shapes
        if param is not None
    )


def _is_ordinary(param: Tensor) -> bool:
    """Whether the class of a parameter leaves torch's functions as they are, as those of sharded parameters do."""
    kind = type(param)
    return (
        issubclass(kind, nn.Parameter)
        and kind.__torch_function__ is nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )
