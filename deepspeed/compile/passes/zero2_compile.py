"""The pass of ZeRO stage 2: gradients are reduced in the graph."""

from __future__ import annotations

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph
from deepspeed.compile.passes.reductions import add_reductions


def add_z2_reduce(graph: StepGraph) -> None:
    """Reduce every gradient where it comes to be."""
    add_reductions(graph)


PASS = CompilePass("zero2_compile", add_z2_reduce, PassContract(frozenset({"stage 2"}), frozenset({"reductions"})))
