"""Small parameters stay whole, as far as memory is free: their gathers cost most for what they save."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import GraphParameter, PassLimits, StepGraph
from deepspeed.compile.operations import RELEASE, START, WAIT


def choose_residents(parameters: Iterable[GraphParameter], resident: dict[int, int], limits: PassLimits) -> None:
    """Choose the smallest parameters that fit."""
    total = sum(resident.values())
    gathered = {each.number: each for each in parameters if each.sharded and each.number not in resident}
    for each in sorted(gathered.values(), key=lambda each: (each.nbytes, each.number)):
        if total + each.nbytes > limits.resident:
            break
        resident[each.number] = each.nbytes
        total += each.nbytes


def selective_gather(graph: StepGraph) -> None:
    """Choose the smallest parameters that fit, and take their gathers and releases out of the graph."""
    choose_residents(graph.parameters.values(), graph.resident, graph.limits)
    for node in list(graph.module.graph.nodes):
        if node.target is START:
            left = [number for number in node.args[0] if number not in graph.resident]
            if left:
                node.args = (left, *node.args[1:])
            else:
                graph.module.graph.erase_node(node)
        elif node.target in (WAIT, RELEASE) and node.args[3] in graph.resident:
            graph.module.graph.erase_node(node)


PASS = CompilePass(
    "selective_gather",
    selective_gather,
    PassContract(frozenset({"gathers"}), frozenset({"residents"})),
    choose_residents,
)
