"""Backward in two parts: gradients of a stage's inputs now, gradients of its weights later.

[Note: two parts] The graph between outputs and inputs is the *way*. A node of the way whose edges also lead off it, to
weights, computes both kinds of gradients, each only when autograd asks for it. The first part asks for the inputs'
alone, and keeps the gradients that came into such nodes; the second part starts again at each of them and asks for the
weights' alone. A weight that several nodes of the way lead to would get gradients through the way a second time, so
its gradient is computed in the first part.

[Note: run again] Layers whose activations are not kept run again in the first part. What they compute then stays until
the second part is through, so that they need not run a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Junction:
    """A node of the way from which weights branch off."""

    node: Node
    weights: list[Tensor]
    arrived: tuple[Tensor | None, ...] = ()

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.arrived = grads


@dataclass
class WeightBackward:
    """The second part of a backward."""

    junctions: list[_Junction] = field(default_factory=list)

    def run(self, before: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Compute the gradients of the weights; `before` is called with those that are next."""
        for junction in self.junctions:
            if before is not None:
                before(junction.weights)
            came = [(number, grad) for number, grad in enumerate(junction.arrived) if grad is not None]
            if came:
                edges = [GradientEdge(junction.node, number) for number, _ in came]
                torch.autograd.backward(edges, [grad for _, grad in came], inputs=junction.weights)
        self.junctions.clear()


def backward_inputs(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Compute the gradients of `inputs`, leaves, and of weights that cannot wait; returns what is left to do."""
    junctions, early = _survey(outputs, inputs)
    handles = [junction.node.register_prehook(junction.keep) for junction in junctions]
    try:
        torch.autograd.backward(
            list(outputs),
            list(grads),
            inputs=[*inputs, *early],
            retain_graph=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return WeightBackward(junctions)


def _survey(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[_Junction], list[Tensor]]:
    """The nodes of the way with weights of their own, and the weights that several of them lead to."""
    roots = [get_gradient_edge(output).node for output in outputs]
    ends = {get_gradient_edge(leaf).node for leaf in inputs}
    order = _ordered(roots)
    way: set[Node] = set()
    for node in order:  # what a node leads to comes before it
        if node in ends or any(after in way for after, _ in node.next_functions):
            way.add(node)
    below: dict[Node, dict[int, Tensor]] = {}
    for node in order:
        if node not in way:
            below[node] = _weights(node, below)
    junctions: list[_Junction] = []
    counts: dict[int, int] = {}
    apart = {id(w): w for node in set(roots) - way for w in below[node].values()}
    for node in order:
        if node in way:
            own = {key: w for after, _ in node.next_functions if after in below for key, w in below[after].items()}
            for key in own:
                counts[key] = counts.get(key, 0) + 1
            if own:
                junctions.append(_Junction(node, list(own.values())))
    early = dict(apart)
    for junction in junctions:
        early.update({id(w): w for w in junction.weights if counts[id(w)] > 1 or id(w) in apart})
        junction.weights = [w for w in junction.weights if id(w) not in early]
    return [junction for junction in junctions if junction.weights], list(early.values())


def _weights(node: Node, below: dict[Node, dict[int, Tensor]]) -> dict[int, Tensor]:
    variable: Any = getattr(node, "variable", None)
    if isinstance(variable, Tensor):
        return {id(variable): variable}
    return {key: w for after, _ in node.next_functions if after in below for key, w in below[after].items()}


def _ordered(roots: Sequence[Node]) -> list[Node]:
    """All nodes, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        pending.append((node, True))
        pending += [(after, False) for after, _ in node.next_functions if after is not None and after not in seen]
    return order


class DeferredBackward:
    """The backward of layers that run again, as a part of one in two parts; see [Note: run again]."""

    def __init__(self) -> None:
        self.wanted = False  # backward comes in two parts
        self._rest: WeightBackward | None = None

    def collect(self, rest: WeightBackward | None) -> None:
        """Leave the gradients of weights to `rest` from now on; None: compute them at once."""
        self._rest = rest

    def backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> None:
        """The gradients of `inputs`, leaves, and of weights now or later."""
        pairs = zip(outputs, grads, strict=True)
        came = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
        roots, given = [output for output, _ in came], [grad for _, grad in came]
        if roots and self._rest is not None:
            self._rest.junctions += backward_inputs(roots, given, inputs).junctions
        elif roots:
            torch.autograd.backward(roots, given)
