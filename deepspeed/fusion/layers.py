"""Linear layers that may be computed without calling them: their parameters are here, and nobody watches them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from deepspeed.fusion.likeness import overridden

__all__ = ["FORWARD", "differentiated", "fits", "is_plain", "only_ours", "ordinary", "unwatched", "watched_everywhere"]

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
    """Whether x is a plain tensor that layers compute with in the dtype that it has."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.is_floating_point()
        and not x.is_inference()
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
