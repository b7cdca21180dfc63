"""`StepGraph`: the forward or the backward of one captured graph, as passes see and change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from deepspeed.compile.operations import ARRIVE, FETCH, LEAVE, REDUCE, RELEASE, ROOM, START, WAIT

# Beyond the numbers that torch gives to regions of activation checkpointing: it keeps what one region gives the next.
_REGION = 1 << 30


@dataclass(frozen=True, eq=False)
class GraphParameter:
    """A parameter of the model, as graphs see it."""

    number: int
    name: str
    param: nn.Parameter
    shape: torch.Size
    """Of the whole parameter."""
    nbytes: int
    """Of the whole parameter."""
    sharded: bool
    """It is whole only between its gather and its release."""


@dataclass(frozen=True)
class PassLimits:
    """Bytes that passes may use; the same on all ranks."""

    prefetch: int
    """Of parameters that are on their way before they are needed."""
    live: int
    """Of gathered parameters, beyond which none is gathered early."""
    resident: int
    """Of parameters that may stay whole for good."""
    activation: int = 5 << 20
    """From which a saved activation is worth its way to the host."""


@dataclass(eq=False)
class StepGraph:
    """What passes get: they change `module.graph` in place."""

    module: fx.GraphModule
    backward: bool
    handle: int
    parameters: dict[Node, GraphParameter]
    """The inputs that are parameters."""
    gradients: dict[int, GraphParameter]
    """The outputs of a backward graph that are gradients of parameters, by place."""
    limits: PassLimits
    kept: frozenset[int] = frozenset()
    """Numbers of the parameters that leave the graph, as an output or a view: they stay whole until the step."""
    owns_gradients: bool = True
    """Nothing writes into a gradient's memory after its last use in the graph."""
    resident: dict[int, int] = field(default_factory=dict)
    """Bytes of the parameters, by number, that passes have chosen to stay whole; over all graphs of a model."""
    returned: int = 0
    """How many outputs of a forward graph leave it; the others are saved for backward."""
    away: set[str] = field(default_factory=set)
    """Names of saved tensors that leave the device; forward's graph says them to backward's."""
    _token: Node | None = None
    _made: dict[Node, frozenset[Node]] = field(default_factory=dict)
    """What `computed_from` gave `uses`."""

    @property
    def token(self) -> Node:
        """What all operations write, so that they keep their order."""
        if self._token is None:
            graph, inputs = self.module.graph, self.inputs()
            likes = [node.meta["val"] for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
            like = next((value for value in likes if value.device.type != "cpu"), likes[0])
            with graph.inserting_after(inputs[-1]):
                self._token = graph.call_function(
                    torch.ops.aten.empty.memory_format, ([1],), {"dtype": torch.uint8, "device": like.device}
                )
            with like.fake_mode:
                self._token.meta["val"] = torch.empty(1, dtype=torch.uint8, device=like.device)
        return self._token

    def inputs(self) -> list[Node]:
        """The placeholders, in order."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> Node:
        found: Node = next(iter(reversed(self.module.graph.nodes)))
        return found

    def uses(self) -> dict[Node, list[Node]]:
        """For each parameter what reads it, in order, also through tensors that are computed from parameters alone."""
        made = self._made = computed_from(self.module.graph.nodes, self.parameters)
        found: dict[Node, list[Node]] = {node: [] for node in self.parameters}
        for node in self.module.graph.nodes:
            if node.op == "output":
                continue
            for origin in {each for source in node.all_input_nodes for each in made.get(source, ())}:
                found[origin].append(node)
        return found

    def start(self, parameters: Sequence[GraphParameter], *, before: Node) -> Node:
        """Begin to gather these before a node."""
        return self._call(START, ([each.number for each in parameters], self.token, self.handle), before)

    def wait(self, place: Node, *, before: Node) -> Node:
        """Have a parameter whole before a node."""
        return self._call(WAIT, (place, self.token, self.handle, self.parameters[place].number), before)

    def release(self, place: Node, readers: Sequence[Node]) -> Node:
        """Let go of a parameter after the last of those that read it, when all of them have their results."""
        made = self._made or computed_from(self.module.graph.nodes, self.parameters)
        results = list(dict.fromkeys(result for reader in readers if reader not in made for result in _results(reader)))
        last = max([readers[-1], *results])
        number = self.parameters[place].number
        return self._call(RELEASE, (place, self.token, self.handle, number, results), last.next)

    def reduce(self, grad: Node, parameter: GraphParameter) -> Node:
        """Hand over a gradient as soon as it is there."""
        token = self.token
        after = token if grad.op == "placeholder" or grad is token else grad
        owned = self.owns_gradients and _is_exclusive(grad)
        return self._call(REDUCE, (grad, token, self.handle, parameter.number, owned), after.next)

    def room(self, nbytes: int, *, after: Node, wait: bool = False) -> Node:
        """Say what the graph holds once a tensor is there; see `deepspeed.compile.operations`."""
        results = [] if after is self.token else [after]
        return self._call(ROOM, (nbytes, self.token, self.handle, wait, results), after.next)

    def leave(self, saved: Node, *, after: Node) -> Node:
        """Let a saved tensor leave the device after the last node that uses it."""
        return self._call(LEAVE, (saved, self.token, self.handle), after.next)

    def fetch(self, saved: Node, *, before: Node) -> Node:
        """Begin to bring a saved tensor back."""
        return self._call(FETCH, (saved, self.token, self.handle), before)

    def arrive(self, saved: Node, *, before: Node) -> Node:
        """Have a saved tensor on the device before a node."""
        return self._call(ARRIVE, (saved, self.token, self.handle), before)

    def _call(self, target: Any, args: tuple[Any, ...], before: Node) -> Node:
        token = self.token
        with self.module.graph.inserting_before(before):
            node = self.module.graph.call_function(target, args)
        assert token.op == "call_function", "it stands behind the inputs, in front of all else"
        node.meta["val"] = None
        return node

    def saved(self) -> dict[int, list[Node]]:
        """By storage, what a forward graph made and saves for backward, without what it returns as well."""
        outputs: Any = self.output.args[0]
        kept = {key for node in (*self.inputs(), *_nodes(outputs[: self.returned])) for key in storages(node)}
        found: dict[int, list[Node]] = {}
        for node in _nodes(outputs[self.returned :]):
            for key in storages(node):
                if key not in kept and node not in found.setdefault(key, []):
                    found[key].append(node)
        return found

    def saved_bytes(self) -> int:
        """Bytes of the device that stay with what a forward graph saves."""
        stay = (nodes[0] for nodes in self.saved().values() if nodes[0].name not in self.away)
        return sum(sum(storages(node).values()) for node in stay)

    def held(self) -> list[tuple[Node, int]]:
        """After each node, the bytes that the graph still needs of what it made, or was given by forward."""
        inputs = set(self.inputs())
        others = {key for node in inputs if not self.backward or node in self.parameters for key in storages(node)}
        nodes = list(self.module.graph.nodes)
        sizes: dict[int, int] = {}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, node in enumerate(nodes):
            own = storages(node) if node.op != "output" else {}
            for key, nbytes in own.items():
                sizes[key] = nbytes
                first.setdefault(key, place)
            for key in (*own, *(key for source in node.all_input_nodes for key in storages(source))):
                last[key] = place
        changes = [0] * (len(nodes) + 1)
        for key in sizes.keys() - others:
            changes[first[key]] += sizes[key]
            changes[last[key]] -= sizes[key] if nodes[last[key]].op != "output" or self.backward else 0
        held = list(accumulate(changes))
        return [(node, held[place]) for place, node in enumerate(nodes) if node not in inputs and node.op != "output"]

    def operations(self) -> list[tuple[str, tuple[int, ...]]]:
        """What ranks do together, in order: what all of them have to have alike."""
        found: list[tuple[str, tuple[int, ...]]] = []
        for node in self.module.graph.nodes:
            if node.target is START:
                found.append(("gather", tuple(node.args[0])))
            elif node.target is WAIT:
                found.append(("wait", (node.args[3],)))
            elif node.target is REDUCE:
                found.append(("reduce", (node.args[3],)))
        return found

    def peak(self) -> int:
        """Bytes of gathered parameters that are alive at once, at most."""
        sizes = {each.number: each.nbytes for each in self.parameters.values()}
        live: set[int] = set()
        most = 0
        for node in self.module.graph.nodes:
            if node.target is START:
                live.update(node.args[0])
                most = max(most, sum(sizes[number] for number in live))
            elif node.target is RELEASE:
                live.discard(node.args[3])
        return most


def storages(node: Node) -> dict[int, int]:
    """The memory of what a node returns, with its bytes; that of views is what they look at."""
    found = {}
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            nbytes: Any = storage.nbytes()
            found[storage._cdata] = nbytes if isinstance(nbytes, int) else int(nbytes.node.hint or 0)
    return found


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [each for each in values if isinstance(each, Node)]


def computed_from(nodes: Iterable[Node], origins: Mapping[Node, Any]) -> dict[Node, frozenset[Node]]:
    """The nodes that are computed from these alone, each with those that it comes from; themselves among them."""
    made: dict[Node, frozenset[Node]] = {node: frozenset({node}) for node in origins}
    for node in nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in made for source in sources):
            made[node] = frozenset[Node]().union(*(made[source] for source in sources))
    return made


def recompute_from(graph: fx.Graph, parameters: Mapping[Node, Any]) -> None:
    """Let backward compute again what comes from parameters alone: kept, it would hold whole parameters."""
    for node in computed_from(graph.nodes, parameters):
        if node.op == "call_function" and not _is_random(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION


def _results(node: Node) -> list[Node]:
    """The tensors that a node computes: itself, or those that are taken out of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_exclusive(node: Node) -> bool:
    """True if nothing else has the memory of what a node returns."""
    if node.op != "call_function" or len(node.users) > 1 or not isinstance(node.target, torch._ops.OpOverload):
        return False
    views = any(result.alias_info is not None for result in node.target._schema.returns)
    return not views or all(map(_is_exclusive, node.all_input_nodes))
