"""A user's module becomes an engine's: its device, dtype and equal values on all ranks; and is one no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.coalesced import broadcast_coalesced
from deepspeed.config.zero import DeepSpeedZeroConfig
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.interface import LiesOn, convert_shards, put_away, shard_of, shards_of


def place(
    module: nn.Module, device: torch.device, precision: Precision, zero: DeepSpeedZeroConfig, *, remote: bool = False
) -> None:
    """Give the module its device and dtype; shards that it was constructed with follow.

    Where parameters live elsewhere (`remote`) only buffers move: the whole model may be larger than the device.
    """
    _accept_forward(module)
    put_away(module)
    _require_values(module)
    if zero.shards_parameters:
        _require_hooks(module)
    if remote:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
    else:
        module.to(device)
    precision.cast_module(module)
    convert_shards(module, zero, stay=remote)
    for param, dtype in precision.reduce_dtypes(module).items():
        param.comm_dtype = dtype  # type: ignore[attr-defined]  # clients look here


def _require_values(module: nn.Module) -> None:
    """Refuse tensors on the meta device, which have shapes and no values."""
    empty = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters or buffers of the model are on the meta device and have no values: "
            f"{', '.join(empty[:4])}{', …' if len(empty) > 4 else ''}. Give them some before deepspeed.initialize: "
            "module.to_empty(device=...) and then a checkpoint or their own initialisation; or build the model inside "
            "deepspeed.zero.Init(), which never holds it whole."
        )


def _require_hooks(module: nn.Module) -> None:
    """Refuse modules of torch.jit that hold parameters: nothing could gather those."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.parameters(), None) is not None:
            raise UsageError(
                f"zero_optimization.stage 3 gathers parameters in hooks, which {name or 'the model'} has not: it is a "
                f"{type(part).__name__} of torch.jit. Use stage 2 or lower, or the module as it was before torch.jit."
            )


def replicate(module: nn.Module, lies_on: LiesOn, *, remote: bool = False) -> None:
    """Give every rank the parameters and buffers of the first rank that holds a copy of the same part.

    Parameters that live elsewhere (`remote`) follow one by one when they are cut.
    """
    parameters = [] if remote else list(module.named_parameters())
    tensors = {id(t): (name, t) for name, t in (*parameters, *module.named_buffers())}
    spread(tensors.values(), lies_on)


@torch.no_grad()
def spread(tensors: Iterable[tuple[str, torch.Tensor]], lies_on: LiesOn) -> None:
    """Give every rank the values of whole tensors that the first rank has which they lie on."""
    axes: dict[tuple[int, ...], tuple[AxisGroup, list[torch.Tensor]]] = {}
    for _, tensor in tensors:
        if tensor.numel() and shard_of(tensor) is None:
            axis = lies_on(tensor)
            axes.setdefault(axis.ranks, (axis, []))[1].append(tensor.detach())
    for axis, whole in axes.values():
        if axis.size > 1:
            with comm.labelled("first values of parameters and buffers"):
                broadcast_coalesced(whole, src=axis.ranks[0], group=axis.group)


class _RefusesForward:
    """A hook before the forward of a module whose parameters are in shards, which no engine gathers any more."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, module: nn.Module, _: Any) -> None:
        empty = [shard.name for shard in shards_of(module.parameters(recurse=False)) if shard.numel and not shard.whole]
        if empty:
            raise UsageError(
                f"{empty[0]} is in shards, because the engine of this model was destroyed at {self._place}. Call "
                "deepspeed.initialize again with the model, or take engine.module_state_dict() before destroy()"
            )


def refuse_forward(model: nn.Module, place: str) -> None:
    """The engine was destroyed at `place`: a forward of what it left in shards is an error."""
    for module in model.modules():
        if shards_of(module.parameters(recurse=False)):
            module.register_forward_pre_hook(_RefusesForward(place))


def _accept_forward(model: nn.Module) -> None:
    """A new engine takes the model."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _RefusesForward)]:
            del hooks[key]
