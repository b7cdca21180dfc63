"""The pass of ZeRO stage 3: parameters are gathered before their first use, and released after their last one."""

from __future__ import annotations

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph
from deepspeed.compile.passes.reductions import add_reductions


def add_z3_gather_release(graph: StepGraph) -> None:
    """Gather each parameter before the first node that uses it, release it after the last, reduce its gradient."""
    for place, used in graph.uses().items():
        parameter = graph.parameters[place]
        if not parameter.sharded or not (used or parameter.number in graph.kept):
            continue
        first = used[0] if used else graph.output
        graph.start([parameter], before=first)
        graph.wait(place, before=first)
        if parameter.number not in graph.kept:
            graph.release(place, used)
    add_reductions(graph)


PASS = CompilePass(
    "zero3_compile",
    add_z3_gather_release,
    PassContract(frozenset({"stage 3"}), frozenset({"gathers", "reductions"})),
)
