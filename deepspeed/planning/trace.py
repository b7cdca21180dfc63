"""Some steps of a real engine as one rank of a pretended world: its memory, collectives and work.

[Note: steps of a trace] The first step learns in which order gradients and parameters come, and makes the optimizer's
states; the second uses this; the third is one of many. Memory is looked at in all of them, since the first may need
most; collectives and work are those of the last. Micro steps between the first and the last of a step are alike: with
accumulation two are run, and the first counts for those that are not. So it is in a pipeline, too: the last step has as
few micro batches as make this rank hold as many as in a whole step, where a rank has one stage; the first steps have
two, where parameters are whole.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as td
from torch import Tensor, nn

from deepspeed import comm
from deepspeed._api import initialize
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.groups import FAKE_PLAYS
from deepspeed.comm.records import Entry, LinkBytes, link_bytes, read
from deepspeed.config import load
from deepspeed.config.batch import MICRO
from deepspeed.config.batch import STEPS as MICRO_STEPS
from deepspeed.config.read import read as read_config
from deepspeed.errors import UsageError
from deepspeed.events import Phase, PhaseBegan, PhaseFinished
from deepspeed.log import NOTICE, logger
from deepspeed.memory.host import HOST_STORAGES
from deepspeed.ops.precompile import rehearsal
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.axes import GRID_AXES
from deepspeed.pipe.engine import PipelineEngine
from deepspeed.pipe.executor import Pass
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule.actions import PassKind, Schedule
from deepspeed.pipe.schedule.simulate import simulate
from deepspeed.planning.sources import Example, ExampleBatch, example_of
from deepspeed.planning.untouched import UntouchedMemory
from deepspeed.profiling.common import tensors_of
from deepspeed.profiling.flops_profiler.count import work_of
from deepspeed.profiling.memory_profiler import (
    ACTIVATIONS,
    GATHERED,
    OTHERS,
    TEMPORARIES,
    MemoryChange,
    MemoryPeak,
    MemoryProfiler,
    StorageMemory,
)
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.out_of_memory import held_tensors
from deepspeed.zero.interface import numel_of

STEPS = 3
FORWARD, BACKWARD, WEIGHTS, STEP = "forward", "backward", "backward of weights", "step"
PHASES = (FORWARD, BACKWARD, WEIGHTS, STEP)
"""Of a step; that of weights is one of its own where a schedule puts it off."""
MESSAGES = ("send", "recv", "isend", "irecv")
BUCKETS, LOGITS, WORKSPACE = "buckets", "logits", "workspace"
_POINTS = 400  # of the curve of a step
KINDS = (
    *("parameters", GATHERED, "copies of neighbours", "gradients", "masters", "moments", "buffers of the model"),
    *(BUCKETS, ACTIVATIONS, LOGITS, WORKSPACE),
)
"""Of memory on the device, in the order in which they are shown."""

# Sections that write files, print, measure or check: none of them changes what other steps hold or send.
_WATCHES = (
    *("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "memory_profiler", "comms_logger"),
    *("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state", "hangs", "timers", "autotuning"),
    *("events", "trace", "verify"),
)


_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *(FAKE_PLAYS, "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)


@contextmanager
def pretended_rank(rank: int, world: int, per_node: int, backend: str = "nccl") -> Iterator[None]:
    """This process is that rank, sends as over that backend, and is what it was afterwards."""
    if td.is_initialized():
        raise UsageError(
            "a plan pretends to be a rank of another world, but torch.distributed is initialised in this process. Call "
            "plan() before deepspeed.initialize, or in a process of its own (ds_plan)"
        )
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    before = {name: os.environ.pop(name, None) for name in _VARIABLES}
    random, device, threads = torch.get_rng_state(), get_accelerator(), torch.get_num_threads()
    nodes = min(per_node, world)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % nodes),
        LOCAL_SIZE=str(nodes),
        LOCAL_WORLD_SIZE=str(nodes),
        **({FAKE_PLAYS: backend} if backend != "nccl" else {}),
    )
    level, hook = logger.level, sys.excepthook
    try:
        if level == NOTICE:  # start and end of a training: there is none
            logger.setLevel(logging.WARNING)
        set_accelerator(CPU_Accelerator())
        td.init_process_group("fake", rank=rank, world_size=world, store=fake.FakeStore())
        yield
    finally:
        if td.is_initialized():
            comm.destroy_process_group()
        logger.setLevel(level)
        sys.excepthook = hook  # torch's group puts the rank before each line
        set_accelerator(device)
        torch.set_rng_state(random)
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class RankPlace(NamedTuple):
    """A rank of a world."""

    rank: int
    world: int
    per_node: int
    backend: str = "nccl"


@dataclass(frozen=True)
class PlannedModel:
    """What is planned: `model_fn` is called once for each rank that is looked at."""

    model_fn: Callable[[], nn.Module]
    config: Mapping[str, Any]
    example: Callable[[], ExampleBatch | None] = lambda: None
    """Asked when the model is there: a script brings both."""
    batch: int | None = None
    sequence: int | None = None
    prepare: Callable[[nn.Module], None] | None = None
    """A change of the model before the engine is built."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal operations of one step."""

    op: str
    axis: str
    ranks: tuple[int, ...]
    size: int
    """Bytes of the message, as the dispatcher records it."""
    phase: str
    count: int
    links: LinkBytes
    """Of one of them."""


@dataclass(frozen=True, slots=True)
class OperationWork:
    """What the equal operations of a phase compute and move in one step."""

    phase: str
    name: str
    dtype: str
    count: int
    flops: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Memory by kind at a point of the step."""

    phase: str
    module: str | None
    kinds: Mapping[str, int]


@dataclass(frozen=True)
class RankTrace:
    """What one rank holds, sends and computes in a step."""

    place: RankPlace
    stage: int
    """Of the pipeline; 0 where there is none."""
    stages: int
    schedule: Schedule | None
    """Of a whole step of a pipeline."""
    batch: tuple[int, int, int]
    """(train batch, micro batch, accumulation steps)."""
    sequence: int | None
    axes: Mapping[str, int]
    parameters: int
    """Elements of the model on this rank's stage and slice, whole."""
    peak: MemoryPeak
    kinds: Mapping[str, int]
    sizes: Mapping[int, int]
    """Bytes of a storage → how many there are at the peak."""
    host: Mapping[str, int]
    collectives: tuple[Collective, ...]
    work: tuple[OperationWork, ...]
    moments: tuple[MemoryMoment, ...]
    overlaps: bool
    partition: tuple[int, ...]
    """Layers of every stage."""
    assumed: tuple[str, ...]


def trace(job: PlannedModel, place: RankPlace) -> RankTrace:
    """Build the engine as that rank and take `STEPS` steps; nothing of it is left."""
    with pretended_rank(*place), ExitStack() as stack:
        memory = stack.enter_context(UntouchedMemory())
        stack.enter_context(rehearsal())
        stack.enter_context(redirect_stdout(sys.stderr))  # tables of engines: a plan may be JSON on the standard output
        with torch.enable_grad():
            return _Tracer(job, place, memory, stack).run()


@dataclass
class _Tracer:
    job: PlannedModel
    place: RankPlace
    memory: UntouchedMemory
    stack: ExitStack
    phases: list[tuple[str, int | None]] = field(default_factory=list)
    """(phase, micro step of this step) that run, the innermost last; no micro step: in none."""
    passes: Iterator[Pass] = field(default_factory=lambda: iter(()))
    """What this rank of a pipeline computes next."""
    began: int = 0
    """Micro steps before this step."""
    work: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    borders: list[tuple[int, str, int | None]] = field(default_factory=list)
    """(collectives so far, phase and micro step that follow) of the step."""
    entries: list[Entry] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    """Embeddings with sparse gradients, which are planned as dense ones."""

    def run(self) -> RankTrace:
        others = tuple(HOST_STORAGES)  # of engines that were here before
        engine = self._engine()
        self.stack.callback(engine.destroy)
        parts = engine._parts
        train, micro, steps = engine.get_batch_info()
        example = example_of(parts.module, self.job.example(), micro, self.job.sequence)
        pipeline = parts.module if isinstance(parts.module, PipelineModule) else None
        schedule = engine._plan(steps) if isinstance(engine, PipelineEngine) else None
        first, ran = _micro_steps(engine, steps, schedule)
        for subscription in (
            parts.events.subscribe(PhaseBegan, self._enter),
            parts.events.subscribe(PhaseFinished, lambda _: self._leave()),
        ):
            self.stack.callback(subscription.close)
        profiler = self._profiler(engine)
        self.memory.sent = lambda tensors: self._sent(profiler, tensors)
        engine.set_train_batch_size(train // steps * first)
        for _ in range(STEPS - 1):
            self._step(engine, example, first)
        engine.set_train_batch_size(train // steps * ran)
        began = len(profiler.changes)
        self.memory.seen = self._seen
        entries = self._step(engine, example, ran)
        self.memory.seen = self.memory.sent = None
        profiler.stop()
        peak = profiler.peak
        assert peak is not None, "a step computes something"
        head = _head(parts.module)
        return RankTrace(
            place=self.place,
            stage=pipeline.stage_id if pipeline is not None else 0,
            stages=pipeline.num_stages if pipeline is not None else 1,
            schedule=schedule,
            batch=(train, micro, steps),
            sequence=example.sequence,
            axes={name: size for name, size in parts.layout.sizes.items() if size > 1},
            parameters=sum(map(numel_of, parts.module.parameters())),
            peak=peak,
            kinds=_kinds(peak, head),
            sizes=_sizes(profiler.changes),
            host=_on_host(engine, others),
            collectives=self._collectives(parts.layout, entries, steps, ran),
            work=self._work(steps / ran),
            moments=_moments(profiler.changes, began, head),
            overlaps=parts.config.schema.zero_optimization.overlaps_comm,
            partition=() if pipeline is None else tuple(b - a for a, b in itertools.pairwise(pipeline.parts)),
            assumed=(*self.assumed, *example.assumed, *_assumed(self.memory, engine, self.dense)),
        )

    def _enter(self, event: PhaseBegan) -> None:
        word = _word(event.phase.value)
        if event.phase in (Phase.FORWARD, Phase.BACKWARD):
            one = next(self.passes, None)
            word = WEIGHTS if one is not None and one.action.op is PassKind.WEIGHT else word
        elif self.phases:
            word = self.phases[-1][0]  # a part of it
        self.phases.append((word, event.micro_step - self.began))
        self.borders.append((len(self.entries), *self.phases[-1]))

    def _leave(self) -> None:
        self.phases.pop()
        self.borders.append((len(self.entries), *(self.phases[-1] if self.phases else (STEP, None))))

    def _engine(self) -> DeepSpeedEngine:
        job = self.job
        model = job.model_fn()
        if not isinstance(model, nn.Module):
            raise UsageError(f"the model function returned a {type(model).__name__}; expected a torch module")
        if job.prepare is not None:
            job.prepare(model)
        for name, part in model.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                part.sparse = False  # which rows a batch touches depends on values
                self.dense.append(name)
        given = filled(job.config, self.assumed)
        if job.batch is not None:
            given = _with_batch(given, job.batch)
        elif given.get(MICRO) == "auto":
            raise UsageError(f'{MICRO} is "auto" in the config; say --batch (batch=), the samples of a micro batch')
        trained = [param for param in model.parameters() if param.requires_grad]
        return initialize(model=model, config=given, model_parameters=trained)[0]

    def _profiler(self, engine: DeepSpeedEngine) -> MemoryProfiler:
        parts = engine._parts
        profiler = MemoryProfiler(parts.module, lambda: held_tensors(parts), parts.device, HOST_STORAGES)
        profiler.start(keep_changes=True)
        self.stack.callback(profiler.stop)
        self.stack.callback(
            parts.events.subscribe(PhaseBegan, lambda e: profiler.enter_phase(_word(e.phase.value))).close
        )
        self.stack.callback(parts.events.subscribe(PhaseFinished, lambda _: profiler.leave_phase()).close)
        return profiler

    def _step(self, engine: Any, example: Example, steps: int) -> list[Entry]:
        """One step; its collectives."""
        self.borders.clear()
        self.began = engine._parts.accumulation.micro_steps
        with DEFAULT.recorded() as entries:
            self.entries = entries
            if isinstance(engine, PipelineEngine):
                self.passes = iter(engine._executor._of_this_rank(engine._plan(steps)))
                engine.train_batch(iter([example.inputs] * steps))
            else:
                for _ in range(steps):
                    engine.backward(example.run(engine))
                    engine.step()
        return entries

    def _sent(self, profiler: MemoryProfiler, tensors: Sequence[Tensor]) -> None:
        if self.phases and self.phases[-1][0] in (BACKWARD, WEIGHTS):
            profiler.name_made(BUCKETS, tensors)

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        flops, _ = work_of(func._overloadpacket, args, kwargs, out)
        moved, widest = 0, None
        for leaf in (*tensors_of(args), *tensors_of(kwargs.values()), *tensors_of((out,))):
            moved += leaf.nbytes
            widest = widest or (leaf.dtype if leaf.is_floating_point() else None)
        key = (self.phases[-1][0] if self.phases else FORWARD, func._overloadpacket.__name__, str(widest)[6:])
        held = self.work.setdefault(key, [0, 0.0, 0.0])
        held[0] += 1
        held[1] += flops
        held[2] += moved

    def _work(self, times: float) -> tuple[OperationWork, ...]:
        """All micro steps of a step, of which `times` as many are alike as were run."""
        found = []
        for (phase, name, dtype), (count, flops, nbytes) in self.work.items():
            repeated = 1.0 if phase == STEP else times
            found.append(
                OperationWork(phase, name, dtype, round(count * repeated), flops * repeated, nbytes * repeated)
            )
        return tuple(found)

    def _collectives(
        self, layout: ParallelLayout, entries: Sequence[Entry], steps: int, ran: int
    ) -> tuple[Collective, ...]:
        """Of a step of so many micro steps, of which `ran` were run."""
        counts: dict[tuple[str, tuple[int, ...], int, str], float] = {}
        borders = iter([*self.borders, (len(entries) + 1, STEP, None)])
        phase, micro = FORWARD, None
        following = next(borders)
        for place, entry in enumerate(entries):
            while following[0] <= place:
                _, phase, micro = following
                following = next(borders)
            record = read(entry)
            given = _MESSAGES_OF.get((record.label or "").partition(" ")[0]) if record.op in MESSAGES else None
            times = steps / ran if given else 1.0 + (steps - ran if ran > 1 and micro == 0 else 0)
            key = (record.op, record.ranks, record.bytes, given or phase)
            counts[key] = counts.get(key, 0.0) + times
        names = _axis_names(layout)
        return tuple(
            Collective(
                op=op,
                axis=names.get(ranks, "other"),
                ranks=ranks,
                size=size,
                phase=phase,
                count=round(count),
                links=link_bytes(op, size, ranks, self.place.per_node),
            )
            for (op, ranks, size, phase), count in counts.items()
        )


def _micro_steps(engine: DeepSpeedEngine, steps: int, schedule: Schedule | None) -> tuple[int, int]:
    """Micro steps of the first steps and of the last one, see [Note: steps of a trace]."""
    if schedule is None or not isinstance(engine, PipelineEngine):
        return min(steps, 2), min(steps, 2)
    if schedule.chunks > 1:  # of these the shortest of several is taken, which may be another for fewer micro batches
        return steps, steps
    rank = engine.module.stage_id
    most = simulate(schedule).peaks[rank]
    counts = range(min(steps, schedule.limits[rank] + 1), steps)
    ran = next((count for count in counts if simulate(engine._plan(count)).peaks[rank] == most), steps)
    return (min(ran, 2) if engine._parts.sharded.coordinator is None else ran), ran


def quiet(config: Any) -> dict[str, Any]:
    """The config without what only watches; states on a disk, which would be written, are refused."""
    made = copy.deepcopy(dict(read_config(config).values))
    for name in _WATCHES:
        made.pop(name, None)
    schema = load(made, partial=True).schema
    zero = schema.zero_optimization
    for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section is not None and section.device.value == "nvme":
            raise UsageError(f"zero_optimization.{key}.device is nvme, and a plan writes no files; plan with cpu")
    if schema.memory.disk:
        raise UsageError("memory.disk: states are to live on a disk, and a plan writes no files; plan without it")
    return made


def filled(config: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """The config with values in place of each "auto" that a client such as Transformers' Trainer replaces.

    What changes no shape is left out; what does is told to `assumed`.
    """
    enabled = {name: (config.get(name) or {}).get("enabled") for name in ("bf16", "fp16")}
    narrow = next((name for answer in (True, "auto") for name in enabled if enabled[name] == answer), None)
    taken = {MICRO_STEPS: 1, "gradient_clipping": 1.0, **{f"{name}.enabled": name == narrow for name in enabled}}

    def settled(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                yield key, dict(settled(value, f"{path}."))
            elif value != "auto" or path == MICRO or path.startswith("zero_optimization."):
                yield key, value  # the engine knows what "auto" is there, or --batch says it
            elif path in taken:
                assumed.append(f'{path} is "auto", taken as {json.dumps(taken[path])}')
                yield key, taken[path]

    return dict(settled({key: value for key, value in config.items() if key != "scheduler"}, ""))


def _with_batch(config: dict[str, Any], batch: int) -> dict[str, Any]:
    """The config with so many samples in a micro batch, where it leaves that open."""
    found = config.get(MICRO)
    if found not in (None, "auto", batch):
        raise UsageError(f"{MICRO} is {found} in the config, and --batch (batch=) says {batch}; remove one of them")
    return {**config, MICRO: batch}


_MESSAGES_OF = {"activation": FORWARD, "gradient": BACKWARD}
"""What a message of a pipeline is, as its label begins → the phase that gave it."""


def _word(phase: str) -> str:
    """The phase that a part of it belongs to."""
    return phase.partition("_")[0]


def _axis_names(layout: ParallelLayout) -> dict[tuple[int, ...], str]:
    """The ranks of this rank's groups → the axes that they are along; fewer axes win where ranks are the same."""
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(GRID_AXES) + 1):
        for names in itertools.combinations(GRID_AXES, count):
            if all(layout.sizes.get(name, 1) > 1 for name in names):
                found.setdefault(tuple(layout[names].ranks), "+".join(names))
    return found


def _head(model: nn.Module) -> frozenset[str]:
    """Paths of the modules that make logits and what a loss needs of them; none where that is not known."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    paths = [path for path, module in model.named_modules() if module is head]
    return frozenset(("", *paths)) if head is not None and paths else frozenset()


def _kind(held: StorageMemory, head: frozenset[str]) -> str:
    if held.kind == ACTIVATIONS and held.module in head:
        return LOGITS
    return WORKSPACE if held.kind in (TEMPORARIES, OTHERS) else held.kind


def _kinds(peak: MemoryPeak, head: frozenset[str]) -> dict[str, int]:
    """Bytes of every kind at the peak."""
    found = dict.fromkeys(KINDS, 0)
    logits = sum(nbytes for path, nbytes in peak.activations.items() if path in head)
    for kind, nbytes in peak.kinds.items():
        found[WORKSPACE if kind in (TEMPORARIES, OTHERS) else kind] += nbytes
    found[ACTIVATIONS] -= logits
    found[LOGITS] += logits
    return found


def _moments(changes: Sequence[MemoryChange], began: int, head: frozenset[str]) -> tuple[MemoryMoment, ...]:
    """Memory by kind through the last step, at the points where module or phase change; at most `_POINTS` of them."""
    now, found = dict.fromkeys(KINDS, 0), list[MemoryMoment]()
    for number, change in enumerate(changes):
        now[_kind(change.held, head)] += change.nbytes
        if number < began:
            continue
        if found and (found[-1].phase, found[-1].module) == (change.place.phase, change.place.module):
            if sum(now.values()) > sum(found[-1].kinds.values()):
                found[-1] = MemoryMoment(change.place.phase, change.place.module, dict(now))
            continue
        found.append(MemoryMoment(change.place.phase, change.place.module, dict(now)))
    every = -(-len(found) // _POINTS) or 1
    runs = (found[at : at + every] for at in range(0, len(found), every))
    return tuple(max(run, key=lambda moment: sum(moment.kinds.values())) for run in runs)


def _sizes(changes: Sequence[MemoryChange]) -> dict[int, int]:
    """Storages by their size when most memory is in use."""
    now = most = best = 0
    for number, change in enumerate(changes):
        now += change.nbytes
        if now > most:
            most, best = now, number
    held: dict[int, int] = {}
    for change in changes[: best + 1]:
        held[id(change.held)] = held.get(id(change.held), 0) + change.nbytes
    return dict(Counter(size for size in held.values() if size > 0))


def _on_host(engine: DeepSpeedEngine, others: Sequence[torch.UntypedStorage]) -> dict[str, int]:
    """Bytes in host memory between steps, by kind."""
    counted: set[int] = set()
    found: dict[str, int] = {}
    for kind, tensors in held_tensors(engine._parts).items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in HOST_STORAGES and storage._cdata not in counted:
                counted.add(storage._cdata)
                found[kind] = found.get(kind, 0) + storage.nbytes()
    strange = set(map(id, others))
    rest = sum(each.nbytes() for each in tuple(HOST_STORAGES) if id(each) not in strange) - sum(found.values())
    return {**found, **({"staging": rest} if rest else {})}


def _assumed(memory: UntouchedMemory, engine: DeepSpeedEngine, dense: Sequence[str]) -> Iterable[str]:
    """What a trace cannot know."""
    if dense:
        yield f"all rows of sparse gradients travel: {', '.join(dense)}"
    if memory.computed:
        yield f"results that depend on values are those of empty memory: {', '.join(sorted(memory.computed))}"
    if engine._parts.experts is not None:
        yield "tokens are spread over experts as by a router without weights"
    if engine.skipped_steps:
        yield f"{engine.skipped_steps} steps were skipped for an overflow of the loss scale"
