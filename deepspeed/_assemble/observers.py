"""What watches an engine: timers, throughput, progress lines, monitors. Nothing here is seen by what works."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import socket
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.peaks import peak_flops
from deepspeed.comm.discover import local_ranks
from deepspeed.comm.tally import OperationTally
from deepspeed.config.explain import batch_values, rows
from deepspeed.config.monitor import HangsConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.events import OverflowFound, PhaseFailed
from deepspeed.log import log_dist, logger, print_dist
from deepspeed.moe.statistics import RouterStatistics
from deepspeed.monitor.event_file import EventFile
from deepspeed.monitor.event_writer import EventSources, EventWriter
from deepspeed.monitor.monitor import MonitorMaster, MonitorSubscriber
from deepspeed.pipe.layers import is_fake_world
from deepspeed.profiling.common import StageGroup
from deepspeed.profiling.memory import MemoryBreakdown, memory_now
from deepspeed.profiling.progress import StepLine
from deepspeed.profiling.throughput import Throughput
from deepspeed.profiling.timers import NoopTimer, WallClock
from deepspeed.runtime.out_of_memory import OutOfMemory, alive, held_tensors
from deepspeed.zero.interface import numel_of

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema
    from deepspeed.profiling.flops_profiler.report import Facts
    from deepspeed.profiling.memory_profiler import StepMemory
    from deepspeed.runtime.parts import Parts


def watch_hangs(schema: Schema) -> None:
    """Watch collectives as the config says; the watch is the process's, so one that says nothing changes nothing."""
    if schema.hangs != HangsConfig():
        comm.watch_hangs(schema.hangs)


def watch(parts: Parts, stack: ExitStack) -> None:
    """Subscribe what the config asks for; it is closed with the stack."""
    schema, events = parts.config.schema, parts.events
    comm.comms_logger.join(parts.config)  # the logger is the process's: other engines and the script use it, too
    times = None
    parts.timers = NoopTimer()
    if schema.wall_clock_breakdown or schema.flops_profiler.enabled:
        times = WallClock().attach(events)
        parts.timers = times.timers
        stack.callback(times.close)
    stages = _stages(parts)
    profiles = comm.get_rank() == 0 or stages is not None
    if schema.flops_profiler.enabled and times is not None and profiles:
        from deepspeed.profiling.flops_profiler.profiler import StepProfile  # torch's formulas are slow to import

        profile = StepProfile(parts.module, schema.flops_profiler, lambda: _facts(parts), stages)
        profile.attach(events, times)
        parts.flops_profiler = profile.profiler
        stack.callback(profile.close)
    if schema.memory_profiler.enabled and profiles:
        parts.memory_profiler = _profile_memory(parts, stack, stages)
    if schema.memory_breakdown:
        stack.callback(MemoryBreakdown(_kinds(parts)).attach(events).close)
    shown = schema.steps_per_print is not None and math.isfinite(schema.steps_per_print)
    parts.tput_timer = Throughput(
        lambda: parts.batch.train if parts.batch else 0,
        synchronized=schema.timers.throughput.synchronized,
    )
    stack.callback(parts.tput_timer.close)
    measured = parts.tput_timer.attach(events) if schema.timers.throughput.enabled and shown else None
    if shown:
        parts.step_line = StepLine(schema.steps_per_print, throughput=measured).attach(events)
        stack.callback(parts.step_line.close)
    parts.monitor = MonitorMaster(schema.monitor_config)
    stack.callback(parts.monitor.close)
    if parts.monitor.enabled:
        stack.callback(MonitorSubscriber(parts.monitor, times=times).attach(events).close)
    writes = _write_events(parts, stack)
    _trace(parts, stack)
    _tune(parts, stack)
    if parts.experts is not None and (parts.monitor.enabled or writes):
        stack.callback(RouterStatistics(parts.module, parts.layout.samples).attach(events).close)
    _verify(parts, stack)
    stack.callback(events.subscribe(PhaseFailed, OutOfMemory(parts)).close)
    if comm.get_rank() == 0:
        stack.callback(events.subscribe(OverflowFound, _tell_overflow).close)
    if schema.vocabulary_size is not None and schema.vocabulary_size % 8:
        above = -(-schema.vocabulary_size // 8) * 8
        log_dist(
            f"vocabulary_size {schema.vocabulary_size} is no multiple of 8, which matrix units of GPUs are fast with; "
            f"padding the vocabulary to {above} would help",
            level=logging.WARNING,
        )
    if schema.dump_state:
        print_dist(_state(parts))
    if schema.disable_python_gc:
        stack.callback(_PYTHON_GC.release)
        _PYTHON_GC.hold()


class _Tokens:
    """Counts the tokens of forward passes that train: those of `input_ids`, or of the first integers of two dims."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.count = 0
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            given = (kwargs.get("input_ids"), *args)
            ids = (x for x in given if isinstance(x, torch.Tensor) and x.dim() > 1 and not x.is_floating_point())
            self.count += next((each.numel() for each in ids), 0)
        return self._forward(*args, **kwargs)


def _kinds(parts: Parts) -> Callable[[], dict[str, int]]:
    """Bytes on the device by kind; what watches must not keep an engine alive."""
    engine = weakref.ref(parts)
    return lambda: {} if (found := engine()) is None else alive(found)


def _write_events(parts: Parts, stack: ExitStack) -> bool:
    """Write events to a file of this rank where `events.file` or DS_EVENTS asks for it; whether they do."""
    section = parts.config.schema.events
    file = section.file or Path(os.environ.get("DS_EVENTS", ""))
    if file == Path():
        return False
    per_node = local_ranks(comm.get_world_size())
    head = {**_run_facts(parts), "every": section.every, "per_node": per_node}
    out = EventFile(file, comm.get_rank(), head, limit=section.max_file_bytes, keep=section.max_files)
    stack.callback(out.close)
    tally = OperationTally(per_node)
    stack.callback(tally.close)
    if parts.config.schema.comms_logger.enabled:
        stack.callback(comm.dispatcher.events.subscribe(comm.CollectiveFinished, tally.time).close)
    parts.forward = tokens = _Tokens(parts.forward)
    index = parts.device.index
    sources = EventSources(lambda: memory_now(index), _kinds(parts), lambda: tokens.count, tally)
    writer = EventWriter(out, sources, section.every).attach(parts.events)
    stack.callback(writer.close)
    last = partial(_close_if_alive, weakref.ref(writer))
    atexit.register(last)
    stack.callback(atexit.unregister, last)
    return True


def _trace(parts: Parts, stack: ExitStack) -> None:
    """Trace the steps of `trace.steps`, on the ranks it names."""
    section, world = parts.config.schema.trace, comm.get_world_size()
    if not section.steps:
        return
    if beyond := [rank for rank in section.ranks if rank >= world]:
        raise DeepSpeedConfigError(
            f"trace.ranks has {beyond[0]}, and this job has {world} ranks; name ranks from 0 to {world - 1}",
            path="trace.ranks",
        )
    if comm.get_rank() in section.ranks:
        from deepspeed.profiling.trace import StepTrace  # torch's profiler is slow to import

        stack.callback(StepTrace(section, comm.get_rank(), _kinds(parts)).attach(parts.events).close)


def _tune(parts: Parts, stack: ExitStack) -> None:
    """Measure the window of `autotuning`, and end this run then."""
    section = parts.config.schema.autotuning
    if not section.enabled:
        return
    from deepspeed.profiling.autotuning import RunSize, TuningRun  # torch's formulas are slow to import

    ranks = parts.kind.model_ranks(parts.layout).size
    params = list(parts.module.parameters())
    total = ranks * sum(map(numel_of, params))
    trained = ranks * sum(numel_of(param) for param in params if param.requires_grad)

    def sizes() -> RunSize:
        batch = parts.batch
        if batch is None:
            return RunSize(parts.layout.data.size, 1, parts.accumulation.steps)
        return RunSize(batch.train, batch.micro, batch.steps)

    run = TuningRun(section, parts.module, sizes, lambda: (total, trained), writes=comm.get_rank() == 0)
    stack.callback(run.attach(parts.events).close)


def _close_if_alive(writer: weakref.ref[EventWriter]) -> None:
    if (found := writer()) is not None:
        found.close()


def _run_facts(parts: Parts) -> dict[str, Any]:
    """What the record that begins a file tells of the run."""
    layout, batch = parts.layout, parts.batch
    facts = _facts(parts)
    return {
        "world": facts.world,
        "data": layout.data.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(parts.device),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "model": type(parts.module).__name__,
        "parameters": sum(numel_of(param) for param in parts.module.parameters()) * facts.model_parallel,
        "peak_flops": facts.peak,
        "stage": int(parts.config.schema.zero_optimization.stage),
        "precision": str(parts.precision.param).removeprefix("torch."),
        "batch": None if batch is None else [batch.train, batch.micro, batch.steps],
    }


def _verify(parts: Parts, stack: ExitStack) -> None:
    config = parts.config.schema.verify
    if config.every is not None:
        from deepspeed.verify.subscriber import StepVerifier  # only a run that is checked needs it

        stack.callback(StepVerifier(parts, config, config.every).attach(parts.events).close)


def _stages(parts: Parts) -> StageGroup | None:
    """Of a pipeline, on the first replica of each stage, what profiles need to tell of all of them; None elsewhere."""
    axis, numbers = parts.layout.pipeline, parts.kind.stages()
    if not numbers or parts.layout.stage.rank:
        return None

    def gather(mine: Any) -> list[Any]:
        if axis.size == 1 or is_fake_world():
            return [mine]
        told: list[Any] = [None] * axis.size
        with comm.labelled("profiles of the stages"):
            comm.all_gather_object(told, mine, group=axis.group)
        return told

    def counted_elsewhere() -> int:
        known = parts.kind.counted_elsewhere()
        return sum(numel_of(param) for param in parts.module.parameters() if id(param) in known)

    stages = " and ".join(map(str, numbers))
    name = f"pipeline rank {axis.rank} (stage {stages}, rank {comm.get_rank()})"
    return StageGroup(name, axis.rank == 0 or is_fake_world(), len(numbers), gather, counted_elsewhere)


def _profile_memory(parts: Parts, stack: ExitStack, stages: StageGroup | None) -> StepMemory:
    """Waits for the step whose peak is asked for; it must not keep an engine alive."""
    from deepspeed.profiling.memory_profiler import MemoryProfiler, StepMemory

    engine = weakref.ref(parts)
    profiler = MemoryProfiler(
        parts.module, lambda: {} if (alive := engine()) is None else held_tensors(alive), parts.device
    )
    step = StepMemory(profiler, parts.config.schema.memory_profiler, stages).attach(parts.events)
    stack.callback(step.close)
    return step


def _facts(parts: Parts) -> Facts:
    """What a profile tells of the job."""
    from deepspeed.profiling.flops_profiler.report import Facts

    batch, layout, accelerator = parts.batch, parts.layout, get_accelerator()
    narrow = parts.precision.param in (torch.float16, torch.bfloat16)
    named = narrow and accelerator.device_name() == "cuda"
    return Facts(
        world=comm.get_world_size(),
        data_parallel=layout.data.size,
        model_parallel=parts.kind.model_ranks(layout).size,
        batch=None if batch is None else batch.micro,
        samples=None if batch is None else batch.train,
        micro_steps=parts.accumulation.steps,
        peak=peak_flops(torch.cuda.get_device_name()) if named else None,
    )


def _state(parts: Parts) -> str:
    """What the engine is made of and every effective value of its config, a line each."""
    config = parts.config
    batch = {} if config.batch is None else batch_values(config.loaded, config.world_size)
    facts = {
        "module": type(parts.module).__name__,
        "parameters": sum(param.numel() for param in parts.module.parameters()),
        "device": parts.device,
        "layout": parts.layout,
        "precision": parts.precision.describe(),
        "optimizer": type(parts.basic_optimizer).__name__,
        "lr_scheduler": type(parts.lr_scheduler).__name__,
    }
    values = {row.path: row.value for row in rows(config.loaded, batch)}
    return "engine state\n" + "\n".join(f"  {name} = {value}" for name, value in {**facts, **values}.items())


def _tell_overflow(event: OverflowFound) -> None:
    if not event.scaled:
        row = f", {event.in_a_row} steps in a row by now" if event.in_a_row > 1 else ""
        logger.warning(
            "step %d skipped%s: a gradient is inf or NaN on some rank. Weights and optimizer states are as they were; "
            "look at the loss and the data of this step. nonfinite_gradients: 'stop' makes it an error.",
            event.step,
            row,
        )
        return
    change = (
        f"the loss scale falls from {event.scale_before:g} to {event.scale_after:g}"
        if event.scale_after != event.scale_before
        else f"the loss scale stays at {event.scale_before:g}"
    )
    logger.warning("step %d skipped: a gradient is inf or NaN on some rank; %s", event.step, change)


class _PythonGc:
    """Python's cyclic collector, off while somebody holds it; it belongs to the process, so holders are counted."""

    def __init__(self) -> None:
        self._holders = 0
        self._was_on = False

    def hold(self) -> None:
        if self._holders == 0:
            self._was_on = gc.isenabled()
            gc.collect()
            gc.disable()
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self._was_on:
            gc.enable()


_PYTHON_GC = _PythonGc()
