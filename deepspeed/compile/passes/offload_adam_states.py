"""Optimizer states leave the device as a graph holds more, and return as it holds less; see `StateOffload`."""

from __future__ import annotations

from itertools import accumulate

import torch

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph

_PARTS = 16
"""In how many parts states leave and return."""
_ALL = 1 << 62


def move_opt_states(graph: StepGraph) -> None:
    """Say how much the graph holds, while copies run concurrently with what it computes."""
    _say(graph, wait=False)


def move_opt_states_sync(graph: StepGraph) -> None:
    """The same where the host waits for every copy: no memory is held for those that are under way."""
    _say(graph, wait=True)


def offload_adam_states_for_init(graph: StepGraph) -> None:
    """All states leave when forward begins, and return for the step."""
    if not graph.backward:
        graph.room(_ALL, after=graph.token, wait=True)


def _say(graph: StepGraph, *, wait: bool) -> None:
    token = graph.token
    held = [(node, nbytes) for node, nbytes in graph.held() if isinstance(node.meta.get("val"), torch.Tensor)]
    assert held[0][0] is token, "it stands in front of all that is computed"
    # Nothing returns in forward; nothing returns in backward that would leave again.
    levels = [nbytes for _, nbytes in held]
    levels = list(accumulate(levels[::-1], max))[::-1] if graph.backward else list(accumulate(levels, max))
    grain, told = max(1, max(levels) // _PARTS), 0
    for (node, _), level in zip(held, (*levels[1:], levels[-1]), strict=True):
        if abs(level - told) >= grain:
            graph.room(level, after=node, wait=wait)
            told = level
    if graph.backward:
        graph.room(0, after=held[-1][0], wait=wait)


_CONTRACT = PassContract(frozenset({"reductions"}), frozenset({"states away"}))

PASS = CompilePass("offload_adam_states", move_opt_states, _CONTRACT)
SYNC = CompilePass("offload_adam_states_sync", move_opt_states_sync, _CONTRACT)
FOR_INIT = CompilePass("offload_adam_states_for_init", offload_adam_states_for_init, _CONTRACT)
