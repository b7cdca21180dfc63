"""State dicts of a module whose experts are spread: what they lack, and who puts them together.

[Note: whole state dicts] `state_dict()` is called on any rank, so it gives what this rank has. Whoever copies it for a
file by `clone_tensors_for_torch_save`, as Accelerate does on every rank, gets whole experts: the dict brings the way to
them along, in its metadata. That takes all ranks. One that calls alone is told so after some seconds: ranks meet in the
job's store before anything is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.checkpoint.storage.rank_meeting import Exchange, default_exchange
from deepspeed.checkpoint.utils import WHOLE
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.log import warn_once
from deepspeed.moe.placing import SpreadExperts, SpreadLayer

__all__ = ["Export", "export_whole", "join_layer"]

_WAYS = (
    "engine.save_16bit_model(), engine.module_state_dict() or, with Accelerate, accelerator.get_state_dict(model), on "
    "all ranks"
)


def export_whole(module: nn.Module, experts: SpreadExperts | None, stack: ExitStack) -> None:
    """Let the state dicts of a module bring along how they become whole, as long as the stack is open."""
    if experts is None or all(layer.groups.ep.size == 1 for layer in experts.layers):
        return
    exchange = default_exchange()
    stack.callback(exchange.close)
    export = Export(experts, exchange)
    for handle in (
        module.register_state_dict_pre_hook(export.begin),
        module._register_state_dict_hook(export.mark),  # torch's public name returns no way to remove it
    ):
        stack.callback(handle.remove)


class Export:
    """The way from one rank's state dict to that of the whole model."""

    def __init__(self, experts: SpreadExperts, exchange: Exchange) -> None:
        self._experts, self._exchange = experts, exchange
        self._asked = False

    def begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Somebody calls `state_dict()`; with `keep_vars` it is the parameters themselves that he wants."""
        self._asked = not keep_vars
        if self._asked:
            warn_once(
                "state_dict() of a model whose experts are spread over ranks has those of this rank, and so would a "
                f"file that is made of it on one rank. A whole model comes from {_WAYS}."
            )

    def mark(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """The dict is there; one of empty tensors, as of parameters in shards, leads nowhere."""
        if self._asked and all(param.numel() for param in module.parameters()):
            metadata[WHOLE] = self
        self._asked = False

    def whole(self, state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
        """The state dict with the experts of all ranks, as the whole model has them; all ranks call this."""
        try:
            with self._exchange.meeting("the state dict of a model with spread experts") as meeting:
                meeting.say(sorted(state)[:1])
        except CheckpointError as error:
            raise UsageError(
                f"this state dict has the experts of rank {self._exchange.rank} alone, and those of other ranks can be "
                f"had only if all ranks ask for them together: {error}. Call {_WAYS}."
            ) from error
        found: OrderedDict[str, Any] = OrderedDict(state)
        for layer in self._experts.layers:
            join_layer(found, self._experts, layer, prefix)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # in a file it means nothing

    def __deepcopy__(self, _: Any) -> Export:
        return self


def join_layer(state: dict[str, Any], experts: SpreadExperts, layer: SpreadLayer, prefix: str = "") -> None:
    """Put the experts of a layer together on all ranks, which call this, by their names in the whole model."""
    if layer.groups.ep.size == 1:
        return
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    names = [name for name in names if layer.holds(name)]
    own = {experts.name_of(name): state[prefix + name].detach().cpu() for name in names}
    told: list[Any] = [None] * layer.groups.ep.size
    comm.all_gather_object(told, own, group=layer.groups.ep.group)
    if layer.stacked:
        state.update({prefix + name: torch.cat([each[name] for each in told]) for name in own})
        return
    for name in names:
        del state[prefix + name]
    state.update({prefix + name: value for each in told for name, value in each.items()})
