"""Connects an engine's parameters with its states, for `deepspeed.zero.public.access`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from logging import WARNING

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.comm.coalesced import broadcast_coalesced
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup
from deepspeed.runtime.backward import Backward
from deepspeed.runtime.parts import Parts
from deepspeed.zero.interface import GradientReducer, OptimizerStates, StateOwner, attach, detach, plain_data


def open_access(parts: Parts, optimizer: Optimizer, states: OptimizerStates, stack: ExitStack) -> StateOwner:
    """Let every parameter of the module find its states until the stack is closed.

    Those that are frozen too: they may be unfrozen. The parameters do not keep the engine alive.
    """
    owner = StateOwner(
        find=states.held,
        adopt=states.adopt_edits,
        optimizer=optimizer,
        unit=partial(_unit, parts.backward, parts.reducer),
        spread=partial(_spread, states),
        sharded=parts.config.schema.zero_optimization.shards_parameters,
    )
    attach(parts.module.parameters(), owner)
    for prefix, module in parts.module.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its parameters are in no dict of Python
        for key, param in module._parameters.items():
            if param is not None and param.requires_grad:
                owner.slots.append((f"{prefix}.{key}" if prefix else key, module, key, param))
    if owner.older:
        _warn_of_older_engines(owner)
    stack.callback(detach, parts.module.parameters(), owner)  # those that it has then
    return owner


def _warn_of_older_engines(owner: StateOwner) -> None:
    """Say which engine can step from now on; one that only waits for Python's collector is no other engine."""
    gc.collect()
    shared = [other.newer[owner] for other in (ref() for ref in owner.older) if other is not None]
    if shared:
        log_dist(
            f"{shared[0]} and perhaps other parameters of this engine are trained by an older engine, too, which was "
            "not destroyed: it refuses to step from now on. Call its destroy() before deepspeed.initialize, or keep "
            "one engine for the model.",
            level=WARNING,
        )


def _unit(backward: Backward, reducer: GradientReducer) -> float | None:
    if backward.updates is not None and backward.updates.taken:
        raise UsageError(
            "optimizer_in_backward.enabled: gradients are used up while backward runs, and there is none to read or to "
            "change between backward and step. Turn the key off, or look at gradients of earlier micro steps."
        )
    if not backward.has_gradients:
        return None
    reducer.finish()
    return backward.unit


@torch.no_grad()
def _spread(states: OptimizerStates, params: Sequence[nn.Parameter], modifier: int) -> None:
    """Give the values of the rank `modifier`, of those that hold a parameter, to all of them; masters follow."""
    states.settle()
    axes: dict[AxisGroup, list[nn.Parameter]] = {}
    for param in params:
        axis = states.ranks_of(param)
        if not 0 <= modifier < axis.size:
            raise UsageError(
                f"GatheredParameters: modifier_rank is {modifier}, but a parameter of shape {tuple(param.shape)} lies "
                f"on {axis.size} ranks"
            )
        axes.setdefault(axis, []).append(param)
    chosen = set(map(id, params))
    for group in states.groups:
        for place, param in enumerate(group.params):
            if id(param) in chosen:
                group.reclaim(place)
    for axis, alike in axes.items():
        if axis.size > 1:
            with comm.labelled("parameters that one rank modified"):
                broadcast_coalesced([plain_data(p) for p in alike], src=axis.ranks[modifier], group=axis.group)
    for piece in (piece for group in states.groups for piece in group.pieces):
        if id(piece.param) in chosen:
            piece.adopt()
