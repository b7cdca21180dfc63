"""Activations that are saved for backward wait in host memory."""

from __future__ import annotations

from torch.fx import Node

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph, storages


def offload_activation(graph: StepGraph) -> None:
    """Large ones leave after their last use in forward; the last one stays. Each is fetched one use ahead."""
    if graph.backward:
        _bring_back(graph)
    else:
        _let_leave(graph)


def _let_leave(graph: StepGraph) -> None:
    nodes = list(graph.module.graph.nodes)
    last = {
        key: place
        for place, node in enumerate(nodes[:-1])
        for each in (node, *node.all_input_nodes)
        for key in storages(each)
    }
    chosen: list[tuple[int, Node, list[Node]]] = []
    for key, saved in graph.saved().items():
        nbytes = storages(saved[0])[key]
        whole = [node for node in saved if node.meta["val"].numel() * node.meta["val"].element_size() == nbytes]
        if whole and nbytes >= graph.limits.activation:
            chosen.append((last[key], whole[0], saved))
    chosen.sort(key=lambda each: each[0])
    for place, node, saved in chosen[:-1]:
        graph.leave(node, after=nodes[place])
        graph.away.update(each.name for each in saved)


def _bring_back(graph: StepGraph) -> None:
    places = {node: place for place, node in enumerate(graph.module.graph.nodes)}
    saved = [node for node in graph.inputs() if node.name in graph.away and node.users]
    first = {node: min(node.users, key=places.__getitem__) for node in saved}
    saved.sort(key=lambda node: places[first[node]])
    for node, following in zip(saved, [*saved[1:], None], strict=True):
        if following is not None:
            graph.fetch(following, before=first[node])
        graph.arrive(node, before=first[node])


PASS = CompilePass(
    "offload_activation",
    offload_activation,
    PassContract(frozenset({"reductions"}), frozenset({"activations on the host"})),
)
