"""The pass of AutoTP: layers that read one tensor share the sum over ranks of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from deepspeed.compile.contracts import CompilePass, PassContract
from deepspeed.compile.graph import StepGraph

_ADD = torch.ops.aten.add.Tensor


def merge_sums(graph: StepGraph) -> None:
    """Sum the total of two summands over ranks, and not each of them."""
    nodes = graph.module.graph
    for node in list(nodes.nodes):
        if node.target is not _ADD or len(node.args) != 2 or node.kwargs:
            continue
        one, other = node.args
        if one is other or not (_is_sum(one) and _is_sum(other)) or one.args[1:] != other.args[1:]:
            continue
        if one.meta["val"].shape != other.meta["val"].shape or one.meta["val"].dtype != other.meta["val"].dtype:
            continue
        with nodes.inserting_before(node):
            total = nodes.call_function(_ADD, (one.args[0], other.args[0]))
            merged = nodes.call_function(one.target, (total, *one.args[1:]))
        total.meta["val"] = merged.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(merged)
        for gone in (node, one, other):
            nodes.erase_node(gone)


def _is_sum(node: Any) -> bool:
    wire = torch.ops.deepspeed_regions.wire.default
    return isinstance(node, Node) and node.target is wire and node.args[2] == "summed" and len(node.users) == 1


PASS = CompilePass("autotp_compile", merge_sums, PassContract(frozenset({"reductions"}), frozenset({"merged sums"})))
