"""When a device runs out of memory: what was alive, by kind, and the cheapest changes of the config that would fit."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config.batch import MICRO
from deepspeed.config.memory import size_text
from deepspeed.events import PhaseFailed
from deepspeed.memory.savings import OPTIMIZER, PARAMETERS, ZERO, JobSizes, Saving, savings
from deepspeed.runtime.parts import Parts
from deepspeed.zero.interface import shards_of


def held_tensors(parts: Parts) -> dict[str, list[Tensor]]:
    """Parameters, gradients, masters, moments and buffers, wherever they are; some may share memory.

    A parameter of which ranks have parts is its part; the memory in which it becomes whole is that of gathered ones.
    """
    params = list(parts.module.parameters())
    shards = [shard for shard in shards_of(params) if not shard.alone]
    own = {id(shard.param) for shard in shards}
    resting = [shard.stored for shard in shards] + [param for param in params if id(param) not in own]
    pieces = [piece for group in parts.states.groups for piece in group.pieces] if parts.states is not None else []
    states = parts.basic_optimizer.state.values() if parts.basic_optimizer is not None else ()
    grads = [param.grad for param in params]
    grads += [grad for piece in pieces for grad in (piece.gradient, piece.master.grad, piece.home)]
    copies = [shard.near.part for shard in shards if shard.near is not None and shard.near.part is not None]
    return {
        **({"copies of neighbours": copies} if copies else {}),
        "gathered parameters": [shard.flat for shard in shards],
        "parameters": [*resting, *(piece.source for piece in pieces)],
        "gradients": [grad for grad in grads if grad is not None],
        "masters": [piece.master for piece in pieces],
        "moments": [value for state in states for value in state.values() if isinstance(value, Tensor)],
        "buffers of the model": list(parts.module.buffers()),
    }


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ADVICE = 3
REST = "activations and everything else"


class OutOfMemory:
    """Adds to the error of a phase what an engine knows of its memory; listens to `PhaseFailed`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = weakref.ref(parts)  # what listens must not keep an engine alive: its parameters know its events

    def __call__(self, event: PhaseFailed) -> None:
        """Only a device that ran out of memory is explained, and only once."""
        error, parts = event.error, self._parts()
        if not isinstance(error, torch.OutOfMemoryError) or "What was alive" in str(error) or parts is None:
            return
        held = alive(parts)
        phase = event.phase.value.partition("_")[0]
        lines = [f"What was alive on {parts.device} in {phase}{_running(error, parts.module)}:"]
        lines += [f"  {nbytes / 2**30:8.2f} GiB  {kind}" for kind, nbytes in held.items()]
        if advice := changes(parts, held, _wanted(str(error))):
            lines += ["The cheapest changes that may free enough:", *(f"  - {line}" for line in advice)]
            lines.append(f"To plan them exactly: {_command(parts)}")
        if parts.memory_profiler is not None:
            lines += parts.memory_profiler.report()
        error.args = ("\n".join([str(error), "", *lines]),)


def _command(parts: Parts) -> str:
    """What plans the job on these ranks and this memory, and every change."""
    total = size_text(int(get_accelerator().total_memory(parts.device.index)))
    layout = parts.layout
    return f"ds_plan SCRIPT CONFIG --world {layout.world.size} --memory {total.replace(' ', '')} --advise"


def _running(error: BaseException, model: nn.Module) -> str:
    """The module in which an error was raised, as the frames tell it, which have none in most of a backward."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            found = f" of {names[id(module)] or 'the model'} ({type(module).__name__})"
        trace = trace.tb_next
    return found


def alive(parts: Parts) -> dict[str, int]:
    """Bytes on the engine's device by kind; what is not known otherwise is what the allocator has besides."""
    seen: set[int] = set()
    found = {kind: _bytes(tensors, parts.device, seen) for kind, tensors in held_tensors(parts).items()}
    total = int(get_accelerator().memory_allocated(parts.device.index))
    return {**found, REST: max(total - sum(found.values()), 0)}


def _bytes(tensors: list[Tensor], device: torch.device, seen: set[int]) -> int:
    """Of memory that was not counted before."""
    total = 0
    for tensor in tensors:
        if tensor.device != device or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def changes(parts: Parts, held: dict[str, int], wanted: int) -> list[str]:
    """What to change, cheapest first: those that free what is missing, or else those that free most."""
    known = list(_options(parts, held))
    enough = [option for option in known if option[1] >= wanted]
    chosen = enough[:_ADVICE] or sorted(known, key=lambda option: -option[1])[:_ADVICE]
    return [f"{text}: frees about {nbytes / 2**30:.2f} GiB" for text, nbytes in chosen]


def _options(parts: Parts, held: dict[str, int]) -> Iterator[tuple[str, int]]:
    """(change, bytes that it frees by arithmetic), from what costs nothing to what costs time."""
    module, zero = parts.module, parts.config.schema.zero_optimization
    away = zero.offload_optimizer if zero.offloads_optimizer else None
    can = hasattr(module, "gradient_checkpointing_enable") and not getattr(module, "is_gradient_checkpointing", False)
    sizes = JobSizes(
        micro=1 if parts.batch is None else parts.batch.micro,
        steps=parts.accumulation.steps,
        replicas=parts.layout.samples.size,
        stage=int(zero.stage),
        states_away=0.0 if away is None else float(away.ratio),
        parameters_away=zero.offloads_parameters,
        pipeline=parts.layout.sizes.get("pp", 1),
        recomputes=not can,
    )
    smaller = False
    for saving in savings(sizes):
        if MICRO not in saving.keys or not smaller:  # the least change of the micro batch
            smaller = smaller or MICRO in saving.keys
            if freed := _freed(saving, sizes, held):
                yield str(saving), freed


def _freed(saving: Saving, sizes: JobSizes, held: dict[str, int]) -> int:
    """Bytes of the device that a change frees, as far as arithmetic knows."""
    rest, zero = held[REST], saving.keys.get(ZERO, {})
    if MICRO in saving.keys:
        return rest - rest * int(saving.keys[MICRO]) // sizes.micro
    if saving.code or "pipeline" in saving.keys:
        return rest * 3 // 4
    states = held["masters"] + held["moments"]
    if OPTIMIZER in zero:
        ratio = zero[OPTIMIZER]["ratio"]
        return int(states * (ratio - sizes.states_away) / (1 - sizes.states_away))
    if PARAMETERS in zero:
        return held["parameters"]
    spread = ((1, states), (2, held["gradients"]), (3, held["parameters"]))  # besides what the stage before spreads
    freed = sum(nbytes for stage, nbytes in spread if sizes.stage < stage <= zero["stage"])
    return freed - freed // sizes.replicas


def _wanted(text: str) -> int:
    """Bytes that could not be had, as torch says it; 0 if it does not."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text)
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
