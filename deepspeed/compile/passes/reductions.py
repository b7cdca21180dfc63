"""Gradients leave the graph where they come to be, and not at its end."""

from __future__ import annotations

from typing import Any, cast

from deepspeed.compile.graph import StepGraph


def add_reductions(graph: StepGraph) -> None:
    """Hand over every gradient of a parameter as soon as it is there; the graph returns it no more."""
    if not graph.backward:
        return
    returned: list[Any] = list(cast("tuple[Any, ...]", graph.output.args[0]))
    for place, parameter in graph.gradients.items():
        grad = returned[place]
        if grad is not None:
            graph.reduce(grad, parameter)
            returned[place] = None
    graph.output.args = (tuple(returned),)
    seen = graph.output.meta.get("user_visible_output_idxs")
    if seen is not None:  # inductor keeps the strides of what users get
        graph.output.meta["user_visible_output_idxs"] = [place for place in seen if returned[place] is not None]
