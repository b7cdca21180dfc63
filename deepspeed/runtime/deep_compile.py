"""DeepCompile of an engine: its model is captured, and the operations in its graphs gather, release and reduce.

[Note: what is not captured] Hooks of stage 3 stay on modules and do nothing while their module is captured. So a module
that runs in Python, behind a graph break or beyond the limit of recompilations, is gathered by its hooks, and gives its
gradients to autograd. Graphs and hooks hold parameters by the same count.

[Note: one order] Each rank captures its own graphs. Before a graph with gathers or reductions runs, ranks compare what
it does, in order: another graph on another rank is an error on all, not a gather of the wrong parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.backend import GraphCompiler, GraphFacts
from deepspeed.compile.contracts import CompilePass, PassRegistry, PassSchedule
from deepspeed.compile.graph import GraphParameter, PassLimits
from deepspeed.compile.operations import dismiss, enrol
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist, log_dist_once
from deepspeed.runtime.backward import runs_in_backward
from deepspeed.runtime.compile_offload import ActivationsAway, StateOffload
from deepspeed.runtime.parts import Parts
from deepspeed.transformers.attention import masks_in_python
from deepspeed.zero.interface import Shard, WholeShapes, gather, shard_of

BACKENDS = ("inductor", "eager")
_WARM_UP = 5
"""Steps after which what is free of the device's memory is known."""


def default_schedule(stage: int, *, roomy: bool) -> list[tuple[int, list[str]]]:
    """The passes of a ZeRO stage where a script gives none; where memory is not `roomy`, nothing stays whole."""
    if stage < 3:
        return [(0, [f"zero{stage}_compile"])]
    always = ["zero3_compile", "prefetch"]
    return [(0, always), (_WARM_UP, [*always, "selective_gather"])] if roomy else [(0, always)]


def asked_passes(schema: Schema) -> list[str]:
    """The passes that keys of the config ask for."""
    keys = {
        "autotp_compile": schema.tensor_parallel.autotp_size > 1,
        "offload_adam_states": schema.compile.offload_opt_states,
        "offload_activation": schema.compile.offload_activation,
    }
    return [name for name, asked in keys.items() if asked]


class DeepCompile:
    """The compiled model of one engine, and what its graphs call."""

    def __init__(
        self, parts: Parts, backend: str, options: dict[str, Any], schedule: PassSchedule, step: Callable[[], int]
    ) -> None:
        """`options` are those of torch.compile; `step` tells how many optimizer steps there have been."""
        self._parts, self._backend, self._schedule, self._step = parts, backend, schedule, step
        self._options = _compile_options(backend, options)
        self._section = parts.config.schema.compile
        self._coordinator = parts.sharded.coordinator
        self._parameters: dict[int, GraphParameter] = {}
        """By id."""
        self._shards: dict[int, Shard] = {}
        """By number, of those that graphs gather."""
        self._params: list[nn.Parameter] = []
        self._collect()
        self.handle = enrol(self)
        self.limits = PassLimits(0, 0, 0)
        self.resident: dict[int, int] = {}
        self.compilers: list[GraphCompiler] = []
        """One for each entry of the schedule that was reached."""
        self._entry = -1
        self._compiled: Callable[..., Any] | None = None
        self._held: dict[int, Shard] = {}
        """What the graph that runs holds."""
        self._alike = False
        """The same gradients wait on all ranks, as far as is known."""
        self.runs = 0
        """Graphs that have run."""
        self.states = StateOffload(parts)
        self.activations = ActivationsAway(parts)
        self._in_backward = False
        self._shapes = WholeShapes(lambda: self._shards.values())
        module = parts.module
        if self._coordinator is not None and parts.sharded.hooks is not None:
            parts.sharded.hooks.give_way(self._shapes)
        before = module._compiled_call_impl
        module._compiled_call_impl = self._call
        parts.resources.callback(dismiss, self.handle)
        parts.resources.callback(setattr, module, "_compiled_call_impl", before)
        for undo in masks_in_python(module):
            parts.resources.callback(undo)

    @property
    def seconds(self) -> float:
        """Spent so far in passes and in the compilers of their graphs."""
        return sum(captured.seconds for compiler in self.compilers for captured in compiler.captured)

    def _collect(self) -> None:
        """Number the parameters that have no number yet; the same on all ranks."""
        for name, param in self._parts.module.named_parameters():
            if id(param) in self._parameters:
                continue
            number, shard = len(self._params), shard_of(param)
            gathered = shard is not None and not (shard.persistent or shard.alone) and shard.numel > 0
            if shard is not None and gathered:
                self._shards[number] = shard
            shape = param.shape if shard is None else shard.shape
            nbytes = shape.numel() * param.element_size()
            self._parameters[id(param)] = GraphParameter(number, name, param, shape, nbytes, gathered)
            self._params.append(param)

    # ---- calls of the model

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._coordinator is not None:
            self._coordinator.bring_back()
        compiled = self._current()
        before = self.runs
        with self._shapes:
            result = compiled(*args, **kwargs)
        if self.runs == before:
            code = type(self._parts.module).forward.__code__
            log_dist_once(
                f"DeepCompile: {type(self._parts.module).__name__} ran in Python, without any graph: "
                f"{code.co_filename}:{code.co_firstlineno}"
            )
        return result

    def _current(self) -> Callable[..., Any]:
        """The model, compiled with the passes that hold at this step."""
        entry = self._schedule.begin(self._step())
        if self._compiled is None or entry != self._entry:
            before, passes = self._schedule.entries.get(self._entry, ()), self._schedule.entries[entry]
            self._entry, self.limits = entry, self._measure()
            added = passes[len(before) :]
            if self._compiled is not None and before == passes[: len(before)] and all(each.choose for each in added):
                self._choose(added)
                return self._compiled
            section = self._section
            free_from = section.free_activation_threshold if section.free_activation else None
            self.compilers.append(
                GraphCompiler(self, self._backend, passes, log=section.debug_log, free_from=free_from)
            )
            module = self._parts.module

            def call(*args: Any, **kwargs: Any) -> Any:
                return module._call_impl(*args, **kwargs)  # torch does not capture it otherwise

            self._compiled = torch.compile(call, backend=self.compilers[-1], **self._options)
            log_dist(f"DeepCompile from step {entry} on: {', '.join(each.name for each in passes)}")
        return self._compiled

    def _choose(self, added: Sequence[CompilePass]) -> None:
        """Passes that come to those of the graphs there are, which stay as they are."""
        graphs = self.compilers[-1].captured
        found = [each for captured in graphs for each in captured.parameters.values()]
        for each in added:
            assert each.choose is not None, "it changes no graph"
            each.choose(found, self.resident, self.limits)

    def _measure(self) -> PassLimits:
        """What passes may use from now on."""
        if self._coordinator is None or not self._shards:
            return PassLimits(0, 0, 0)
        schedule = self._coordinator.schedule
        width = max(param.element_size() for param in self._params)
        free = get_accelerator().available_memory() // 2
        if self._parts.device.type == "cpu":
            free //= comm.get_world_size()
        return PassLimits(
            prefetch=schedule.limits.ahead * width,
            live=schedule.limits.live * width,
            resident=schedule.least(free, "memory that is free for parameters"),
        )

    # ---- what graphs are made of

    def parameter(self, tensor: object) -> GraphParameter | None:
        """What graphs call a tensor, if it is a parameter of the model."""
        if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
            self._collect()
        return self._parameters.get(id(tensor))

    @contextmanager
    def running(self, facts: GraphFacts) -> Iterator[None]:
        """A graph runs: parameters have their shapes, and ranks run the same one."""
        self.runs += 1
        with self._accounted(facts), self._whole_inside(facts):
            yield

    @contextmanager
    def _accounted(self, facts: GraphFacts) -> Iterator[None]:
        """Keep in mind what waits for backward."""
        outside, self._in_backward = self._in_backward, facts.backward
        if facts.backward:
            self.states.saved = max(0, self.states.saved - facts.saved)
        try:
            yield
            self.states.saved += 0 if facts.backward else facts.saved
        finally:
            self._in_backward = outside
            self.activations.settle()

    @contextmanager
    def _whole_inside(self, facts: GraphFacts) -> Iterator[None]:
        """Parameters have their shapes; what ranks do together, all of them do."""
        if self._coordinator is None:
            yield
            return
        outside, self._alike = self._alike, False
        with ExitStack() as stack:
            stack.enter_context(self._shapes)
            key = (facts.backward, facts.operations, sorted(facts.kept), sorted(self.resident))
            if facts.operations or self._moving():
                self._alike = self._coordinator.schedule.run_graph(key, facts.describe())
            if moving := self._moving():
                self._coordinator.schedule.stay(moving)
            try:
                yield
            finally:
                self._alike = outside
                self._let_go(facts.kept)

    def _moving(self) -> list[Shard]:
        """What a pass has chosen to stay whole, and does not yet."""
        return [self._shards[number] for number in sorted(self.resident) if not self._shards[number].persistent]

    def _let_go(self, kept: frozenset[int]) -> None:
        """The graph is over; what it returned stays whole."""
        assert self._coordinator is not None, "parameters are gathered"
        held, self._held = self._held, {}
        self._coordinator.keep_until_step(shard for number, shard in held.items() if number in kept)
        for shard in held.values():
            shard.holds -= 1
        self._coordinator.schedule.let_go(held.values())

    # ---- what graphs do: `deepspeed.compile.operations.GraphRuntime`

    def start(self, numbers: list[int]) -> None:
        """Begin to gather parameters that are not whole."""
        assert self._coordinator is not None, "parameters are gathered"
        if self._section.sync_before_allgather:
            get_accelerator().synchronize()
        self._coordinator.schedule.fetch([self._shards[number] for number in numbers])

    def wait(self, number: int) -> None:
        """Return when a parameter is whole; it stays so until `release`."""
        shard = self._shards[number]
        if not shard.whole:
            self.start([number])
            gather.finish([shard])
        if self._section.sync_after_allgather:
            get_accelerator().synchronize()
        if number not in self._held:
            self._held[number] = shard
            shard.holds += 1

    def release(self, number: int) -> None:
        """This graph does not need a parameter any more."""
        assert self._coordinator is not None, "parameters are gathered"
        shard = self._held.pop(number)
        shard.holds -= 1
        self._coordinator.schedule.let_go([shard])

    @torch.no_grad()
    def reduce(self, number: int, grad: Tensor) -> None:
        """As autograd, add a gradient to what is there and tell the hooks; nothing where autograd would not."""
        param = self._params[number]
        if not runs_in_backward(get_gradient_edge(param).node):
            return
        if param._backward_hooks:
            name = self._parameters[id(param)].name
            raise UsageError(
                f"a hook of the gradient of {name} (register_hook) was registered after the model was compiled, and "
                "compile.deepcompile would not call it; register it before engine.compile"
            )
        if self._section.sync_before_reduce:
            get_accelerator().synchronize()
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)
        hooks: dict[int, Callable[[Tensor], None]] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            hook(param)
        if self._alike and self._coordinator is not None:
            self._coordinator.schedule.launch_ready()
        if self._section.sync_after_reduce:
            get_accelerator().synchronize()

    def room(self, nbytes: int, *, wait: bool) -> None:
        """See [Note: room for activations]; states stay away until the last backward of a step."""
        returns = self._in_backward and self._parts.accumulation.at_boundary
        self.states.hold(nbytes, wait=wait, returns=returns)

    def leave(self, saved: Tensor) -> None:
        """Forward has read a tensor for the last time that is saved for backward."""
        self.activations.leave(saved)

    def fetch(self, saved: Tensor) -> None:
        """Backward needs it soon."""
        self.activations.fetch(saved)

    def arrive(self, saved: Tensor) -> None:
        """Backward reads it from now on."""
        self.activations.arrive(saved)


def _compile_options(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of torch.compile for a backend of ours: its modes are options of inductor."""
    found = dict(options)
    mode, given = found.pop("mode", None), dict(found.pop("options", None) or {})
    if backend == "eager" and (mode is not None or given):
        raise DeepSpeedConfigError(
            "compile_kwargs has mode or options, which are inductor's, but the backend is eager; remove them",
            path="compile.deepcompile",
        )
    if mode is not None:
        given = {**torch._inductor.list_mode_options(mode, found.get("dynamic")), **given}
    if given.get("triton.cudagraphs"):
        raise DeepSpeedConfigError(
            "compile_kwargs asks for CUDA graphs (mode reduce-overhead or max-autotune), which need memory that stays, "
            "but DeepCompile frees and fills parameters; use mode max-autotune-no-cudagraphs, or none",
            path="compile.deepcompile",
        )
    return {**found, "options": given} if given else found


def deep_compile(
    parts: Parts,
    registry: PassRegistry,
    backend: Any,
    options: dict[str, Any],
    schedule: Sequence[tuple[int, Sequence[Any]]] | None,
    step: Callable[[], int],
) -> DeepCompile | None:
    """Compile the model of an engine with DeepCompile; None at ZeRO stage 0, where it has nothing to add."""
    backend = backend if backend is not None else options.pop("backend", get_accelerator().get_compile_backend())
    if backend not in BACKENDS:
        raise DeepSpeedConfigError(
            f"compile.deepcompile: the backend is {backend!r}; DeepCompile works with {' and '.join(BACKENDS)}. Use "
            "one of them, or set compile.deepcompile to false",
            path="compile.deepcompile",
        )
    stage = int(parts.config.schema.zero_optimization.stage)
    if stage == 0:
        log_dist("DeepCompile has no passes for zero_optimization.stage 0: plain torch.compile is used")
        return None
    if not parts.kind.whole:
        raise DeepSpeedConfigError(
            "compile.deepcompile: a pipeline runs its stages apart, which DeepCompile does not capture; set it to "
            "false",
            path="compile.deepcompile",
        )
    schema = parts.config.schema
    roomy = not (schema.compile.offload_opt_states or schema.compile.offload_activation)
    entries = schedule or default_schedule(stage, roomy=roomy)
    return DeepCompile(parts, backend, options, registry.schedule(entries, stage, asked_passes(schema)), step)
