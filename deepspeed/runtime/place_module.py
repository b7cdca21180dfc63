"""A user's module becomes an engine's: its device, its dtype, and equal values on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.coalesced import broadcast_coalesced
from deepspeed.config.zero import DeepSpeedZeroConfig
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.precision.policy import Precision
from deepspeed.zero.interface import LiesOn, convert_shards, put_away, shard_of


def place(
    module: nn.Module, device: torch.device, precision: Precision, zero: DeepSpeedZeroConfig, *, remote: bool = False
) -> None:
    """Give the module its device and dtype; shards that it was constructed with follow.

    Where parameters live elsewhere (`remote`) only buffers move: the whole model may be larger than the device.
    """
    put_away(module)
    _require_values(module)
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
