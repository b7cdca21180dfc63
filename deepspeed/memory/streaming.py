"""Weights that stream: parts of a model whose tensors wait in host memory or on disk, and come when they compute.

[Note: units and buffers] A unit is a block of the model (a module in a list of modules), or a module outside of blocks.
Units fill the device, then host memory, then the disk; each one is in one tier. Those outside of the device share two
buffers there: while one unit computes out of the first, the next one is copied to the second. Which one is next is
learned from the last pass. A tensor is shown in a buffer by its `data`, and where it rests as soon as the buffer is
given to another unit; so tensors stay the objects that they are, and can be read at any time.

[Note: order of copies] A copy waits for what was queued to compute before it, which is all that used its buffer. From
disk a unit is read to host memory first, one unit ahead of the copy; on a CPU it is read straight into the buffer.

[Note: one copy stream]
Copies of both directions share a stream. A host buffer is only touched by copies, so the order of the stream makes it
safe to use one again at once: what is written into it waits for what was read from it. Device memory is allocated and
freed in the order of the stream that computes; `copy` therefore waits for what computes now, and `join` makes what
computes later wait for a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.side_stream import SideStream
from deepspeed.comm.discover import local_ranks
from deepspeed.config.memory import AioConfig, MemoryConfig, size_text
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist
from deepspeed.memory.budget import DEVICE, DISK, HOST, Budget, budgets_of
from deepspeed.memory.host import host_empty
from deepspeed.memory.tier import SwapFile, file_engine
from deepspeed.ops.aio import FileTicket


def on_device(tensor: torch.Tensor) -> bool:
    """True if the tensor is not in host memory already."""
    return tensor.device.type != "cpu"


class PendingCopy:
    """A copy that was asked for; this one is in the order of what computes."""

    def done(self) -> bool:
        """True once the values are there and the source is no longer read."""
        return True

    def join(self) -> None:
        """What is queued from now on runs after the copy."""

    def wait(self) -> None:
        """Return once the copy is done."""


class CopyStream:
    """Runs copies, first come first served; this one among what computes, which waits for them."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Copy once all that is queued so far is done."""
        into.copy_(source, non_blocking=True)
        return PendingCopy()

    def synchronize(self) -> None:
        """Wait until all copies are done."""


class _CopyOnStream(PendingCopy):
    def __init__(self, event: Any, index: int | None) -> None:
        self._event = event
        self._index = index

    def done(self) -> bool:
        return bool(self._event.query())

    def join(self) -> None:
        accelerator = get_accelerator()
        with accelerator.device(self._index):
            self._event.wait(accelerator.current_stream())

    def wait(self) -> None:
        self._event.synchronize()


class DeviceCopyStream(CopyStream):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        with get_accelerator().device(self._index):
            self._beside = SideStream(device)
        self._last: Any = None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        with get_accelerator().device(self._index):
            with self._beside:
                into.copy_(source, non_blocking=True)
            self._last = self._beside.record()
        return _CopyOnStream(self._last, self._index)

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.synchronize()


def copy_stream_for(device: torch.device) -> CopyStream:
    """A stream of the device's own where it has streams."""
    accelerator = get_accelerator()
    has_streams = accelerator.Stream is not None and device.type == accelerator.device_name()
    return DeviceCopyStream(device) if has_streams else CopyStream()


_ALIGNMENT = 256
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False, slots=True)
class StreamUnit:
    """Tensors that come and go together; see [Note: units and buffers]."""

    modules: dict[str, nn.Module]
    """By name; several where they share tensors."""
    fixed: list[Tensor] = field(default_factory=list)
    """Of the unit that stays on the device: what no module of another unit has."""
    tier: str = DEVICE
    rest: Tensor | None = None
    """All bytes, in host memory or as a region of the swap file."""
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    """The tensors that stream, and where in the bytes they begin."""
    buffer: _Buffer | None = None
    uses: int = 0
    """Modules of it that compute now."""

    def tensors(self) -> list[Tensor]:
        """Each one once."""
        found = list(self.fixed)
        for module in self.modules.values():
            found += [*module.parameters(), *module.buffers()]
        return list({id(each): each for each in found}.values())

    def show(self, whole: Tensor) -> None:
        """Let the tensors be views of these bytes."""
        for tensor, start in self.parts:
            tensor.data = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(eq=False, slots=True)
class _Buffer:
    memory: Tensor
    host: Tensor | None
    """Where bytes of the disk arrive, on the way to a device that files cannot be read to."""
    unit: StreamUnit | None = None
    ticket: FileTicket | None = None
    copy: PendingCopy = field(default_factory=PendingCopy)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Where weights may live."""

    memory: MemoryConfig
    pinned: bool = True


def units_of(model: nn.Module) -> list[StreamUnit]:
    """The units of a model in the order in which they get the device: what is fixed, what is outside of blocks, blocks.

    A module that has tensors beside other modules is a unit as a whole, because it may use theirs.
    """
    outer: dict[str, nn.Module] = {}
    blocks: dict[str, nn.Module] = {}
    _visit(model, "", False, outer, blocks)
    owner: dict[int, StreamUnit] = {}
    units: dict[int, StreamUnit] = {}
    for name, module in {**outer, **blocks}.items():
        ids = {id(each) for each in (*module.parameters(), *module.buffers())}
        unit = StreamUnit({name: module})
        for other in {id(owner[each]): owner[each] for each in ids if each in owner}.values():
            unit.modules = {**other.modules, **unit.modules}
            units.pop(id(other))
        if ids:
            units[id(unit)] = unit
            owner.update({id(each): unit for each in unit.tensors()})
    tensors = (*model.parameters(), *model.buffers())
    fixed = StreamUnit({}, [each for each in tensors if id(each) not in owner])
    return [fixed, *units.values()]


def _visit(module: nn.Module, name: str, listed: bool, outer: dict[str, Any], blocks: dict[str, Any]) -> None:
    is_list, children = isinstance(module, _LISTS), dict(module.named_children())
    own = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if name and not is_list and (listed or own or not children):
        (blocks if listed else outer)[name] = module
        return
    for key, child in children.items():
        _visit(child, f"{name}.{key}".strip("."), is_list, outer, blocks)


class WeightStream:
    """The units of one model, in their tiers; `start` lets them come when they are used, `close` ends that."""

    def __init__(self, model: nn.Module, settings: StreamSettings, device: torch.device) -> None:
        self.units = units_of(model)
        self.device = device
        self._budgets = list(budgets_of(settings.memory, ranks=local_ranks()))
        self._used = {budget.tier: 0 for budget in self._budgets}
        self._left = list(self._budgets)
        self._pinned = settings.pinned and device.type != "cpu"
        self._copies = copy_stream_for(device)
        self._engine = file_engine(AioConfig())
        self._folder = settings.memory.path
        self._swap: SwapFile | None = None
        self._buffers: list[_Buffer] = []
        self._unit_of: dict[int, StreamUnit] = {}
        self._next: dict[int, int] = {}
        """By identities of modules: which one came next in the last pass."""
        self._last = 0
        self._undo = ExitStack()

    @property
    def streams(self) -> bool:
        """Whether any unit is outside of the device."""
        return any(unit.tier != DEVICE for unit in self.units)

    @torch.no_grad()
    def settle(self, unit: StreamUnit) -> None:
        """Put a unit, whose values are final now, into its tier."""
        tensors = unit.tensors()
        moving = [each for each in tensors if each.dim() > 1 or isinstance(each, nn.Parameter)]
        moving = [each for each in moving if type(each.data) is Tensor and each.numel()]
        size = 0
        starts: list[int] = []
        for tensor in moving:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        unit.tier = self._place(unit, size)
        if unit.tier != DEVICE:
            unit.parts = list(zip(moving, starts, strict=True))
            whole = host_empty(size, torch.uint8, pinned=self._pinned and unit.tier == HOST)
            for tensor, start in unit.parts:
                whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            unit.rest = whole if unit.tier == HOST else self._written(whole)
            unit.show(unit.rest)
        streamed = {id(tensor) for tensor, _ in unit.parts}
        for tensor in tensors:
            if id(tensor) not in streamed and tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)

    def _place(self, unit: StreamUnit, size: int) -> str:
        """The tier of the next unit: faster ones first, and none again that was too small once."""
        if unit.fixed or not size:
            self._used[DEVICE] += size
            return DEVICE
        while self._left:
            budget = self._left[0]
            if budget.limit is None or self._used[budget.tier] + size <= budget.limit:
                self._used[budget.tier] += size
                return budget.tier
            self._left.pop(0)
        raise self._no_place(unit, size)

    def _no_place(self, unit: StreamUnit, size: int) -> DeepSpeedConfigError:
        def told(budget: Budget) -> str:
            return f"{budget.tier} {size_text(budget.limit or 0)} ({size_text(self._used[budget.tier])} taken)"

        advice = "Raise one of them" if self._budgets[-1].tier == DISK else "Give memory.disk and memory.path"
        return DeepSpeedConfigError(
            f"memory: {next(iter(unit.modules))} needs {size_text(size)}, and a rank may use "
            f"{', '.join(map(told, self._budgets))}. {advice}, or hold weights in fewer bits (quantization).",
            path="memory",
        )

    def _written(self, whole: Tensor) -> Tensor:
        assert self._folder is not None, "a budget for the disk has a path"
        if self._swap is None:
            self._swap = SwapFile(self._folder, "memory.path")
        region = self._swap.take(whole.numel(), torch.uint8)
        self._engine.write(self._swap.path, whole, self._swap.offset_of(region)).wait()
        return region

    def start(self) -> None:
        """Let units come when their modules compute. Modules that stream no longer follow `to()` and its kin."""
        if not self.streams:
            return
        for unit in self.units:
            for module in unit.modules.values() if unit.tier != DEVICE else ():
                self._unit_of[id(module)] = unit
                self._undo.callback(module.register_forward_pre_hook(self._before, prepend=True).remove)
                self._undo.callback(module.register_forward_hook(self._after, always_call=True).remove)
                module.__dict__["_apply"] = partial(_stays, module)
                self._undo.callback(module.__dict__.pop, "_apply", None)
        order = list(self._unit_of)
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self._buffers = [self._buffer(), self._buffer()]
        counts = {tier: [unit for unit in self.units if unit.tier == tier and unit.tensors()] for tier in self._used}
        tiers = [f"{tier} {size_text(self._used[tier])} ({len(held)} units)" for tier, held in counts.items() if held]
        log_dist(
            f"weights: {', '.join(tiers)}; what is not on the device streams through two buffers of "
            f"{size_text(self._buffers[0].memory.numel())}, without graphs of the device"
        )

    def _buffer(self) -> _Buffer:
        size = max(unit.rest.numel() for unit in self.units if unit.rest is not None)
        through = self._swap is not None and self.device.type != "cpu"
        host = host_empty(size, torch.uint8, pinned=self._pinned) if through else None
        return _Buffer(torch.empty(size, dtype=torch.uint8, device=self.device), host)

    @torch.no_grad()
    @torch.inference_mode(False)
    def _before(self, module: nn.Module, _: Any) -> None:
        """Have a module's unit in a buffer, and begin to bring the next one."""
        unit = self._unit_of[id(module)]
        self._next[self._last], self._last = id(module), id(module)
        if not self._buffers:
            self._buffers = [self._buffer(), self._buffer()]
        buffer = unit.buffer or self._begin(unit, self._free() or self._one_more())
        unit.uses += 1
        if unit.uses == 1:
            self._arrive(buffer, unit)
        following = self._following(id(module))
        if following is not None and (free := self._free()) is not None:
            self._begin(following, free)

    def _after(self, module: nn.Module, *_: Any) -> None:
        self._unit_of[id(module)].uses -= 1

    def _following(self, module: int) -> StreamUnit | None:
        """The unit of the modules that come next, if it is another one and is not there yet."""
        unit, seen = self._unit_of[module], {module}
        while (module := self._next.get(module, 0)) and module not in seen:
            seen.add(module)
            if self._unit_of[module] is not unit:
                found = self._unit_of[module]
                return found if found.buffer is None else None
        return None

    def _free(self) -> _Buffer | None:
        """The buffer that was filled longest ago, of those out of which nothing computes."""
        return next((each for each in self._buffers if each.unit is None or not each.unit.uses), None)

    def _one_more(self) -> _Buffer:
        """For units that compute inside of others."""
        self._buffers.append(self._buffer())
        return self._buffers[-1]

    def _begin(self, unit: StreamUnit, buffer: _Buffer) -> _Buffer:
        self._leave(buffer)
        self._buffers.sort(key=lambda each: each is buffer)
        buffer.unit, unit.buffer = unit, buffer
        assert unit.rest is not None, "only units outside of the device come"
        if unit.tier == HOST:
            buffer.copy = self._copies.copy(buffer.memory[: unit.rest.numel()], unit.rest)
        else:
            buffer.copy.wait()  # out of the same host memory
            assert self._swap is not None, "units of the disk have a file"
            into = buffer.memory if buffer.host is None else buffer.host
            offset = self._swap.offset_of(unit.rest)
            buffer.ticket = self._engine.read(self._swap.path, into[: unit.rest.numel()], offset)
        return buffer

    def _arrive(self, buffer: _Buffer, unit: StreamUnit) -> None:
        if buffer.ticket is not None:
            ticket, buffer.ticket = buffer.ticket, None
            ticket.wait()
            if buffer.host is not None:
                size = unit.rest.numel() if unit.rest is not None else 0
                buffer.copy = self._copies.copy(buffer.memory[:size], buffer.host[:size])
        buffer.copy.join()
        unit.show(buffer.memory)

    def _leave(self, buffer: _Buffer) -> None:
        unit, buffer.unit = buffer.unit, None
        if buffer.ticket is not None:
            buffer.ticket.wait()
            buffer.ticket = None
        if unit is not None and unit.rest is not None:
            unit.buffer = None
            unit.show(unit.rest)

    def park(self) -> None:
        """Show all tensors where they rest, and free the buffers until a unit is used again."""
        self._copies.synchronize()
        for buffer in self._buffers:
            self._leave(buffer)
        self._buffers = []

    def close(self) -> None:
        """Let the model be one whose tensors lie where they rest."""
        self.park()
        self._undo.close()
        self._engine.close()
        if self._swap is not None:
            self._swap.close()


def _stays(module: nn.Module, *_: Any) -> nn.Module:
    return module


def stream_weights(
    model: nn.Module,
    settings: StreamSettings,
    device: torch.device,
    ready: Callable[[StreamUnit], None],
    undo: ExitStack,
) -> WeightStream | None:
    """Put the weights of a model into tiers, unit by unit, after `ready` gave a unit its final values.

    None where all of them found room on the device.
    """
    stream = WeightStream(model, settings, device)
    with ExitStack() as failed:
        failed.callback(stream.close)
        for unit in stream.units:
            ready(unit)
            stream.settle(unit)
        stream.start()
        failed.pop_all()
    if not stream.streams:
        stream.close()
        return None
    undo.callback(stream.close)
    return stream
