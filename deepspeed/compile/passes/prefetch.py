"""Gathers begin ahead of their use, several by one operation, while the graph computes."""

from __future__ import annotations

from collections import deque

from torch.fx import Node

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import GraphParameter, StepGraph
from deepspeed.compile.operations import RELEASE, START, WAIT


def schedule_prefetch(graph: StepGraph) -> None:
    """After each gather begin the next ones, as far as limits allow: bytes on their way, and bytes alive."""
    by_number = {each.number: each for each in graph.parameters.values()}
    waits: list[Node] = []
    for node in list(graph.module.graph.nodes):
        if node.target is START:
            graph.module.graph.erase_node(node)
        elif node.target is WAIT:
            waits.append(node)
    ahead = deque(by_number[int(str(node.args[3]))] for node in waits)
    started: set[int] = set()
    flying = live = 0
    for node in list(graph.module.graph.nodes):
        if node.target is RELEASE:
            live -= by_number[node.args[3]].nbytes
        elif node.target is WAIT:
            own = by_number[node.args[3]]
            if own.number not in started:
                together: list[GraphParameter] = []
                while ahead and (not together or _fits(graph, ahead[0], flying, live)):
                    each = ahead.popleft()
                    together.append(each)
                    flying, live = flying + each.nbytes, live + each.nbytes
                started.update(each.number for each in together)
                graph.start(together, before=node)
            flying -= own.nbytes
            next_ones: list[GraphParameter] = []
            while ahead and _fits(graph, ahead[0], flying, live):
                each = ahead.popleft()
                next_ones.append(each)
                flying, live = flying + each.nbytes, live + each.nbytes
            if next_ones:
                started.update(each.number for each in next_ones)
                graph.start(next_ones, before=node.next)


def _fits(graph: StepGraph, parameter: GraphParameter, flying: int, live: int) -> bool:
    limits = graph.limits
    return flying + parameter.nbytes <= limits.prefetch and live + parameter.nbytes <= limits.live


PASS = CompilePass("prefetch", schedule_prefetch, PassContract(frozenset({"gathers"}), frozenset({"early gathers"})))
