"""`GraphCompiler`: what torch.compile calls with a captured graph; passes run over its forward and its backward.

AOTAutograd makes two graphs of it. Parameters are inputs of both, so that backward gathers them itself. The compilers
are torch's own: none, or inductor.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch._guards import Source, TracingContext

from deepspeed.compile.contracts import CompilePass
from deepspeed.compile.graph import GraphParameter, PassLimits, StepGraph, recompute_from, storages
from deepspeed.errors import UsageError
from deepspeed.log import log_dist, log_dist_once

Compiled = Callable[[list[Any]], Any]
CompileGraph = Callable[[fx.GraphModule, Sequence[Any]], Compiled]

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class GraphFacts:
    """What an engine has to know of a graph that it runs."""

    number: int
    """Of the captured graph, in the order in which they were captured."""
    backward: bool
    operations: tuple[tuple[str, tuple[int, ...]], ...]
    """What ranks do together."""
    kept: frozenset[int]
    """Parameters that stay whole until the step."""
    peak: int
    """Bytes of gathered parameters that are alive at once, at most."""
    saved: int = 0
    """Bytes of the device that wait for backward: those of the forward of the same captured graph."""

    def describe(self) -> str:
        """For messages."""
        return f"the {'backward' if self.backward else 'forward'} of graph {self.number}"


class GraphHost(Protocol):
    """The engine whose model is compiled."""

    handle: int
    limits: PassLimits
    resident: dict[int, int]

    def parameter(self, tensor: object) -> GraphParameter | None:
        """What graphs call a tensor, if it is a parameter of the model."""

    def running(self, facts: GraphFacts) -> AbstractContextManager[Any]:
        """Around each run of a graph."""


@dataclass(eq=False)
class CapturedGraph:
    """One graph that dynamo captured, and what becomes of it."""

    number: int
    host: GraphHost
    passes: Sequence[CompilePass]
    inputs: int
    """How many it has."""
    parameters: dict[int, GraphParameter]
    """By the place of the input."""
    log: bool
    owns_gradients: bool
    places: dict[str, GraphParameter] = field(default_factory=dict)
    """By the name of the input, which is the same in all graphs that are made of this one."""
    kept: frozenset[int] = frozenset()
    returned: int = 1 << 30
    """How many outputs of forward are not saved for backward."""
    away: set[str] = field(default_factory=set)
    """Saved tensors that leave the device, by name."""
    saved: int = 0
    """Bytes of the others."""
    facts: list[GraphFacts] = field(default_factory=list)
    """Of its forward and its backward, once they are compiled."""
    seconds: float = 0.0
    """Spent in passes and compilers."""

    def prepare(self, graph: fx.Graph) -> None:
        """See forward and backward together, before they are two graphs; or a part of them, which is left alone."""
        inputs = _inputs(graph)
        if len(inputs) < self.inputs or any("primals" not in node.name for node in inputs[: self.inputs]):
            return
        self._find(graph)
        recompute_from(graph, {node: self.places[node.name] for node in _inputs(graph) if node.name in self.places})

    def compile(self, module: fx.GraphModule, backward: bool, compiler: Callable[[], Any]) -> Compiled:
        """Run the passes over one of the two graphs, then its compiler."""
        began = time.perf_counter()
        if not backward:
            self._find(module.graph)
            self._look_at_aliases()
        parameters = {node: self.places[node.name] for node in _inputs(module.graph) if node.name in self.places}
        trained = {
            place: each
            for place, each in self.parameters.items()
            if each.param.requires_grad and not each.param._backward_hooks
        }
        host = self.host
        graph = StepGraph(
            module, backward, host.handle, parameters, trained if backward else {}, host.limits, self.kept,
            self.owns_gradients, host.resident, self.returned, self.away,
        )  # fmt: skip
        for each in self.passes:
            each.function(graph)
            module.graph.lint()
        for node in module.graph.nodes:
            node.meta.pop("mutation_region_id", None)  # what inductor noted before there were writes
        module.recompile()
        if not backward:
            self.saved = graph.saved_bytes()
        facts = GraphFacts(self.number, backward, tuple(graph.operations()), self.kept, graph.peak(), self.saved)
        self.facts.append(facts)
        if self.log:
            log_dist(f"{facts.describe()}, after {', '.join(each.name for each in self.passes)}:\n{module.code}")
        compiled = compiler()
        self.seconds += time.perf_counter() - began
        return _RunsInEngine(compiled, facts, host)

    def _find(self, graph: fx.Graph) -> None:
        """Note what the parameters among the inputs are called."""
        inputs = _inputs(graph)
        for place, each in self.parameters.items():
            shape = tuple(inputs[place].meta["val"].shape)
            if shape != tuple(each.shape):
                raise UsageError(
                    f"compile.deepcompile: {each.name} has the shape {tuple(each.shape)}, but the graph has {shape} in "
                    "its place; turn compile.deepcompile off for this model"
                )
            self.places[inputs[place].name] = each

    def _look_at_aliases(self) -> None:
        """Parameters that leave the graph cannot be let go at its end; those that it writes are refused."""
        context = TracingContext.try_get()
        facts: Any = None if context is None else context.fw_metadata
        if facts is None:
            return
        self.returned = facts.num_forward
        for place, each in self.parameters.items():
            if each.sharded and facts.input_info[place].mutates_data:
                raise UsageError(
                    f"compile.deepcompile: the model writes into {each.name} in its forward, where ZeRO stage 3 has it "
                    "whole for a moment only; write it inside deepspeed.zero.GatheredParameters"
                )
        outside = {info.base_idx for info in facts.output_info if info.base_idx is not None}
        self.kept = frozenset(each.number for place, each in self.parameters.items() if place in outside)


class _RunsInEngine:
    """A compiled graph that its engine knows to run; called as torch calls what compilers return."""

    def __init__(self, compiled: Compiled, facts: GraphFacts, host: GraphHost) -> None:
        self._compiled, self._facts, self._host = compiled, facts, host
        self._boxed_call = True  # of the object: torch wraps it, and copies what objects have

    def __call__(self, args: list[Any]) -> Any:
        with self._host.running(self._facts):
            return self._compiled(args)


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


class GraphCompiler:
    """The backend of one engine; counts and keeps what it has captured."""

    def __init__(
        self,
        host: GraphHost,
        backend: str,
        passes: Sequence[CompilePass],
        *,
        log: bool,
        free_from: int | None = None,
    ) -> None:
        """Backward graphs that run as they are free inputs early where one has at least `free_from` bytes."""
        self._host, self._backend, self._passes, self._log = host, backend, passes, log
        self._free_from = free_from
        self.captured: list[CapturedGraph] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Any:
        parameters: dict[int, GraphParameter] = {}
        for place, node in enumerate(_inputs(module.graph)):
            given: Any = node.meta.get("grapharg")
            # what the model gave as an input when the graph was captured
            found = self._host.parameter(getattr(given, "example", None))
            if found is not None:
                parameters[place] = found
                _only_with(given.source)
        eager = self._backend == "eager"
        number = len(self.captured)
        captured = CapturedGraph(number, self._host, self._passes, len(inputs), parameters, self._log, eager)
        self.captured.append(captured)
        self._tell(module, inputs, number)
        if eager:
            return _uncompiled(captured, module, inputs, self._free_from)
        from deepspeed.compile.inductor import by_inductor

        return by_inductor(captured, module, inputs, options or {})

    def _tell(self, module: fx.GraphModule, inputs: Sequence[Any], number: int) -> None:
        """Log once why a graph ends early, and that it has sizes that change."""
        reason: Any = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            stack = list(reversed(reason.user_stack))
            frame = next((each for each in stack if "/torch/" not in each.filename), stack[0] if stack else None)
            where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
            text = str(reason.reason).strip().splitlines()[0]
            log_dist_once(f"DeepCompile: graph {number} ends at {where}, which runs in Python: {text}")
        if any(isinstance(each, torch.SymInt) for each in inputs):
            log_dist_once(f"DeepCompile: graph {number} has dynamic shapes, from {_first_line(module)} on")


def _only_with(source: Source) -> None:
    """Let the graph that is captured run with this very tensor: its operations do not fit the next layer's."""
    from torch._dynamo.guards import GuardBuilder  # loads the compiler, which takes seconds

    TracingContext.get().guards_context.dynamo_guards.add(source.make_guard(GuardBuilder.ID_MATCH))


def _first_line(module: fx.GraphModule) -> str:
    """Where the model's code begins that a graph computes."""
    for node in module.graph.nodes:
        found = list(_LINE.finditer(node.stack_trace or ""))
        if node.op != "placeholder" and found:
            return f"{found[-1]['file']}:{found[-1]['line']}"
    return "an unknown line"


def _as_it_is(module: fx.GraphModule, free_from: int | None) -> Compiled:
    """Run a graph as Python, or node by node, which frees each of its inputs after the last node that uses it."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    sizes = (nbytes for node in _inputs(module.graph) for nbytes in storages(node).values())
    if free_from is None or max(sizes, default=0) < free_from:
        return make_boxed_func(module.forward)
    return fx.Interpreter(module).boxed_run


def _uncompiled(captured: CapturedGraph, module: fx.GraphModule, inputs: Sequence[Any], free_from: int | None) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiles(backward: bool) -> CompileGraph:
        limit = free_from if backward else None
        return lambda graph, _: captured.compile(graph, backward, lambda: _as_it_is(graph, limit))

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        captured.prepare(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    forward, backward = compiles(False), compiles(True)
    backend: Any = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=forward, partition_fn=partition
    )
    return backend(module, inputs)
