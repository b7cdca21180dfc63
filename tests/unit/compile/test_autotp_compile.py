"""The sums of two gradients of one tensor become one sum."""

import torch
from torch import fx

from deepspeed.compile.graph import PassLimits, StepGraph
from deepspeed.compile.passes.autotp_compile import merge_sums
from deepspeed.parallel import regions

assert regions is not None, "it defines the operation"
WIRE = torch.ops.deepspeed_regions.wire.default


def sums(groups):
    """A graph that adds the sums of its inputs over ranks, each over the group of that name."""
    graph = fx.Graph()
    total = None
    for group in groups:
        given = graph.placeholder(f"given_{len(graph.nodes)}")
        one = graph.call_function(WIRE, (given, group, "summed", [], 0))
        total = one if total is None else graph.call_function(torch.ops.aten.add.Tensor, (total, one))
    graph.output((total,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    module = fx.GraphModule(torch.nn.Module(), graph)
    merge_sums(StepGraph(module, True, 0, {}, {}, PassLimits(0, 0, 0)))
    module.graph.lint()
    return [node.args[1] for node in module.graph.nodes if node.target is WIRE]


def test_sums_over_one_group_are_merged():
    assert sums(["a", "a", "a"]) == ["a"]
    assert sums(["a", "a", "b"]) == ["a", "b"]
    assert sums(["a", "b", "b"]) == ["a", "b", "b"], "a sum that was added to another group's stays"
