"""Plain PyTorch's state dicts of a model in shards: whole ones are loaded, empty ones are refused with advice."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from deepspeed.log import warn_once
from deepspeed.zero.parameters.shard import shard_of


def meet_state_dicts(module: nn.Module, stack: ExitStack) -> None:
    """Let `load_state_dict` of the module and those below it take whole values; warn where `state_dict` is empty.

    The stack undoes that. With `keep_vars=True`, as this library calls it, there is no warning: then the caller wants
    the parameters themselves.
    """
    for each in module.modules():
        stack.callback(each.register_state_dict_pre_hook(_warn_if_empty).remove)
        stack.callback(each.register_load_state_dict_pre_hook(_take).remove)


def _warn_if_empty(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars and any(map(_is_empty, module.parameters(recurse=False))):
        warn_once(
            "state_dict() of a model whose parameters are sharded has empty tensors. Use engine.module_state_dict() or "
            "engine.zero3_consolidated_16bit_state_dict(), which gather them, or call it inside "
            "deepspeed.zero.GatheredParameters(module.parameters())."
        )


def _is_empty(param: nn.Parameter) -> bool:
    shard = shard_of(param)
    return shard is not None and not shard.whole and bool(shard.numel)


def _take(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *rest: Any,
) -> None:
    """Every rank cuts its own part of the whole values; what torch finds afterwards is as empty as the parameter."""
    errors: list[str] = rest[-1]
    for name, param in module._parameters.items():
        key = prefix + name
        value = state_dict.get(key)
        if param is None or not _is_empty(param) or not isinstance(value, Tensor) or value.shape == param.shape:
            continue
        shard = shard_of(param)
        assert shard is not None, "only shards are empty"
        if metadata.get("assign_to_params_buffers"):
            errors.append(f"{key} is sharded, so it cannot be replaced: leave assign=True out")
        elif value.shape != shard.shape:
            errors.append(f"{key} has the shape {tuple(value.shape)} there and {tuple(shard.shape)} in the model")
        else:
            shard.cut(value)
        state_dict[key] = param.detach()
