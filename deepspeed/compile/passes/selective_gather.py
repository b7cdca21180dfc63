"""Small parameters stay whole, as far as memory is free: their gathers cost most for what they save."""

from __future__ import annotations

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph
from deepspeed.compile.operations import RELEASE, START, WAIT


def selective_gather(graph: StepGraph) -> None:
    """Choose the smallest parameters that fit, and take their gathers and releases out of the graph."""
    total = sum(graph.resident.values())
    gathered = (each for each in graph.parameters.values() if each.sharded and each.number not in graph.resident)
    for each in sorted(gathered, key=lambda each: (each.nbytes, each.number)):
        if total + each.nbytes > graph.limits.resident:
            break
        graph.resident[each.number] = each.nbytes
        total += each.nbytes
    for node in list(graph.module.graph.nodes):
        if node.target is START:
            left = [number for number in node.args[0] if number not in graph.resident]
            if left:
                node.args = (left, *node.args[1:])
            else:
                graph.module.graph.erase_node(node)
        elif node.target in (WAIT, RELEASE) and node.args[3] in graph.resident:
            graph.module.graph.erase_node(node)


PASS = CompilePass("selective_gather", selective_gather, PassContract(frozenset({"gathers"}), frozenset({"residents"})))
