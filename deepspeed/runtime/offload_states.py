"""The engine's `offload_states` and `reload_states`: states leave the device for a while, between steps."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from deepspeed.config.zero import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import UsageError
from deepspeed.log import logger
from deepspeed.runtime.parts import Parts
from deepspeed.zero.interface import OptimizerStates, shards_of

Kind = OffloadStateTypeEnum
_READ = frozenset({Kind.lp_params})
_TRAIN = frozenset({Kind.lp_params, Kind.lp_grads, Kind.contiguous_grad_buffer})


def move_states(
    parts: Parts, include: Container[Kind] | None, target: OffloadDeviceEnum, *, pinned: bool, blocking: bool
) -> None:
    """Move what is included, or everything, to host memory; see `engine.offload_states`."""
    if parts.sharded.remote is not None:
        raise UsageError(
            "engine.offload_states() cannot be combined with zero_optimization.offload_param: the parameters are "
            "not on the device anyway"
        )
    if target is OffloadDeviceEnum.nvme:
        raise UsageError("engine.offload_states() moves states to the cpu alone; device is nvme")
    if target is OffloadDeviceEnum.none:
        logger.warning("engine.offload_states() was called with the device none, so nothing moves")
        return
    chosen = _chosen(include)
    if not parts.moved and parts.states is not None:
        parts.states.settle()
    found = inventory(parts)
    known = [tensor for tensors in found.values() for tensor in tensors]
    wanted = [tensor for kind in chosen for tensor in found[kind]]
    if not parts.moved:
        parts.resources.callback(return_states, parts)
    parts.parking.park(wanted, known, pinned=pinned, blocking=blocking)
    parts.moved |= chosen
    _close_access(parts)


def require_here(moved: set[Kind], call: str, *, trains: bool, steps: bool = False) -> None:
    """Refuse a call that needs states that are away."""
    needed = frozenset(Kind) if steps else _TRAIN if trains else _READ
    if moved & needed:
        raise UsageError(_away(call, moved & needed))


def get_state_devices(model: Any, state: Kind) -> set[torch.device]:
    """Where an engine's tensors of a kind are now; buckets of gradients come and go, on the device of the engine."""
    parts: Parts = model._parts
    kind = Kind(state)
    if kind is Kind.contiguous_grad_buffer:
        return set() if kind in parts.moved else {parts.device}
    return {tensor.device for tensor in inventory(parts)[kind] if tensor.untyped_storage().nbytes()}


def inventory(parts: Parts) -> dict[Kind, list[Tensor]]:
    """The tensors of each kind on this rank's device; what lives in another tier already is in none."""
    states, optimizer = parts.states, parts.basic_optimizer
    if states is None or optimizer is None:
        raise UsageError("engine.offload_states() moves the states of an optimizer, and this engine has none")
    params: list[Tensor] = list(parts.module.parameters())
    for shard in shards_of(params):
        params += [shard.stored, shard.flat, shard.full]
    own = {each.untyped_storage()._cdata for each in params}
    pieces = [piece for group in states.groups for piece in group.pieces if not piece.away]
    masters: list[Tensor] = [piece.master for piece in pieces if piece.master.untyped_storage()._cdata not in own]
    moments = [
        value
        for piece in pieces
        for value in optimizer.state.get(piece.master, {}).values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    grads = [param.grad for param in parts.module.parameters()]
    for piece in pieces:
        grads += [piece.gradient, piece.master.grad, piece.home]
    return {
        Kind.optim_states: moments,
        Kind.hp_params: masters,
        Kind.lp_params: params,
        Kind.lp_grads: [grad for grad in grads if grad is not None],
        Kind.contiguous_grad_buffer: [],  # buckets are made when they are needed
    }


def _chosen(include: Container[Kind] | None) -> set[Kind]:
    if include is None:
        return set(Kind)
    chosen = {kind for kind in Kind if kind in include}
    names = [kind.value for kind in Kind]
    strange = isinstance(include, Iterable) and any(each not in names for each in include)
    if not chosen or strange:
        raise UsageError(f"engine.offload_states(): include is {include!r}; expected some of {names}")
    return chosen


def _away(call: str, kinds: Iterable[Kind]) -> str:
    names = ", ".join(sorted(kind.value for kind in kinds))
    return (
        f"{call} needs {names}, which engine.offload_states() moved to host memory; call engine.reload_states() first"
    )


class _MovedParameter:
    """`deepspeed.zero.states.late_parameters.PendingUpdate` that never comes by itself."""

    def __init__(self, why: str) -> None:
        self._why = why

    def wait(self) -> None:
        """Say what to do."""
        raise UsageError(self._why)


def _close_access(parts: Parts) -> None:
    """Errors for reads of states, or gathers of parameters, that say where they are."""
    states: OptimizerStates | None = parts.states
    assert states is not None, "there is an optimizer"
    states.absent = _away("this", parts.moved)
    if Kind.lp_params in parts.moved:
        if parts.sharded.coordinator is not None:
            parts.sharded.coordinator.free_copies()
        for shard in shards_of(parts.module.parameters()):
            shard.late = _MovedParameter(_away(f"gathering {shard.name}", _READ))


def return_states(parts: Parts, blocking: bool = True) -> None:
    """Bring everything back that `move_states` took away; harmless if that is nothing."""
    if not parts.moved:
        return
    parts.parking.bring_back(blocking=blocking)
    parts.moved.clear()
    if parts.states is not None:
        parts.states.absent = ""
    for shard in shards_of(parts.module.parameters()):
        if isinstance(shard.late, _MovedParameter):
            shard.late = None
