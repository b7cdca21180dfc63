"""Where a step needs most memory: bytes by kind at that moment, and the module that was running.

Torch's dispatcher shows what an operation returns; a weak reference to its storage tells when it is freed. That needs
no allocator that counts, so that a CPU has an account as well.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.accelerator import get_accelerator
from deepspeed.config.monitor import MemoryProfilerConfig
from deepspeed.errors import UsageError
from deepspeed.events import EventStream, PhaseBegan, PhaseFailed, PhaseFinished, RunContinued, StepFinished
from deepspeed.log import print_dist
from deepspeed.profiling.common import StageGroup, leave, tensors_of, to_file_or_output, write_report

OTHERS = "everything else"
PARAMETERS, GATHERED = "parameters", "gathered parameters"
ELASTIC = (PARAMETERS, GATHERED)
"""The kinds whose memory comes and goes under the same storage."""


@dataclass(slots=True, eq=False)
class StorageMemory:
    """Memory of one storage."""

    nbytes: int
    kind: str
    module: str | None


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """What was alive when most was."""

    total: int
    place: AllocationSite
    operation: str
    alive: tuple[StorageMemory, ...]


class MemoryChange(NamedTuple):
    """Memory that came, or went where `nbytes` is below zero; `held` knows its kind in the end."""

    held: StorageMemory
    nbytes: int
    place: AllocationSite


class TensorLedger(TorchDispatchMode):
    """While it is entered, keeps the moment at which most memory of `device` was in use.

    `allocator` tells the most that it had in use since the beginning; None: what is alive is summed. Storages that
    `elsewhere` knows are not the device's.
    """

    def __init__(
        self,
        device: torch.device,
        where: Callable[[], AllocationSite],
        allocator: Callable[[], int] | None = None,
        elsewhere: Container[torch.UntypedStorage] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment: PeakMoment | None = None
        self.changes: list[MemoryChange] | None = None
        """What came and went, where somebody asks for it."""
        self._elsewhere = elsewhere
        self._device = device
        self._where = where
        self._allocator = allocator
        self._alive: dict[int, StorageMemory] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._elastic: set[int] = set()
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in self._ours((*tensors_of(args), *tensors_of((kwargs or {}).values()))):
            self._know(tensor, OTHERS)  # what was there before anybody looked
        place = self._where()
        out = func(*args, **(kwargs or {}))
        for tensor in self._ours(tensors_of((out,))):
            self._know(tensor, place.makes, place.module)
        self.look(place, str(func._overloadpacket))
        return out

    def name(self, kinds: Mapping[str, Iterable[Tensor]]) -> None:
        """These tensors are of these kinds, the first one where they share memory; moments of the past see it, too."""
        seen: set[int] = set()
        for kind, tensors in kinds.items():
            for tensor in self._ours(tensors):
                key = tensor.untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    self._know(tensor, kind).kind = kind
                    if kind in ELASTIC:
                        self._elastic.add(key)

    def name_made(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """What operations made of these tensors, and has no name by itself, is of this kind."""
        for tensor in self._ours(tensors):
            held = self._know(tensor, kind)
            if held.kind in (ACTIVATIONS, TEMPORARIES, OTHERS):
                held.kind = kind

    def close(self) -> None:
        """Forget all but the moment."""
        self._ends.clear()
        self._elastic.clear()
        self._alive.clear()

    def look(self, place: AllocationSite, operation: str) -> None:
        """See whether this is the moment."""
        self._stretch()
        total = self._bytes if self._allocator is None else self._allocator()
        if self.moment is None or total > self.moment.total:
            self.moment = PeakMoment(total, place, operation, tuple(self._alive.values()))

    def _ours(self, values: Iterable[Any]) -> Iterable[Tensor]:
        """Tensors that have memory of their own on the device; wrappers show what they wrap."""
        for value in values:
            if (
                isinstance(value, Tensor)
                and value.device == self._device
                and value.layout is torch.strided
                and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
                and not (self._elsewhere and value.untyped_storage() in self._elsewhere)
            ):
                yield value

    def _count(self, held: StorageMemory, nbytes: int) -> None:
        self._bytes += nbytes
        if self.changes is not None:
            self.changes.append(MemoryChange(held, nbytes, self._where()))

    def _know(self, tensor: Tensor, kind: str, module: str | None = None) -> StorageMemory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._alive.get(key)
        if held is None:
            held = self._alive[key] = StorageMemory(storage.nbytes(), kind, module)
            self._ends[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._count(held, held.nbytes)
        return held

    def _forget(self, key: int) -> None:
        self._ends.pop(key, None)
        self._elastic.discard(key)
        held = self._alive.pop(key, None)
        if held is not None:
            self._count(held, -held.nbytes)

    def _stretch(self) -> None:
        """Read the sizes of what grows and shrinks."""
        for key in tuple(self._elastic):
            storage, held = self._ends[key](), self._alive[key]
            if storage is not None and (now := storage.nbytes()) != held.nbytes:
                self._count(held, now - held.nbytes)
                self._alive[key] = replace(held, nbytes=now)  # a moment of the past keeps the size that it saw


ACTIVATIONS = "activations"
TEMPORARIES = "gradients of activations, temporaries"

_FORWARD, _BACKWARD, _BETWEEN = "forward", "backward", "between phases"
_SEEN = "_deepspeed_made_by_a_module"


@dataclass(frozen=True, slots=True)
class AllocationSite:
    """A moment of a step."""

    phase: str
    module: str | None
    """The path of the module, "" for the model itself; None: none is running."""
    makes: str
    """The kind of what is made there, unless it turns out to be something else."""


class ModuleTracker:
    """Listens to the modules of a model from construction to `close`.

    In backward a module begins when the gradient of its output is there, and ends with those of its inputs: hooks of
    tensors, since those of modules put nodes into the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.phases: list[str] = []
        self._running: list[str] = []
        self._back: str | None = None
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            begin, end = self._begins(name), self._ends(name)
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def now(self) -> AllocationSite:
        """Where the step is."""
        phase = self.phases[-1] if self.phases else None
        if self._running:  # in backward: computed again
            return AllocationSite(phase or _FORWARD, self._running[-1], ACTIVATIONS)
        if phase == _BACKWARD or (phase is None and self._back is not None):
            return AllocationSite(_BACKWARD, self._back, TEMPORARIES)
        return AllocationSite(phase or _BETWEEN, None, ACTIVATIONS if phase in (_FORWARD, None) else TEMPORARIES)

    def enter(self, phase: str) -> None:
        """A phase begins."""
        if phase != _BACKWARD or _BACKWARD not in self.phases:
            self._back = None
        self.phases.append(phase)

    def leave(self) -> None:
        """The innermost phase is over."""
        if self.phases and self.phases.pop() == _BACKWARD and _BACKWARD not in self.phases:
            self._back = None

    def _begins(self, name: str) -> Callable[..., None]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not name:
                self._back = None  # another forward
            self._running.append(name)
            for tensor in _differentiable((args, kwargs)):
                tensor.register_hook(lambda _: self._came_out(name))

        return begin

    def _ends(self, name: str) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, out: Any) -> None:
            while self._running and self._running.pop() != name:
                pass  # modules that ended by an exception
            for tensor in _differentiable(out):
                if not hasattr(tensor, _SEEN):  # what a module hands through was made by one inside it
                    setattr(tensor, _SEEN, True)
                    tensor.register_hook(lambda _: self._came_in(name))

        return end

    def _came_in(self, name: str) -> None:
        self._back = name

    def _came_out(self, name: str) -> None:
        if self._back == name:
            self._back = name.rpartition(".")[0] if name else None


def _differentiable(values: Any) -> Iterator[Tensor]:
    """Tensors that a backward comes to; a wrapper that computes what it is asked for (lazy logits) is left alone."""
    if torch.is_grad_enabled():
        for leaf in tree_leaves(values):
            plain = isinstance(leaf, Tensor) and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
            if plain and leaf.requires_grad:
                yield leaf


NOBODY = "(no module)"

Kinds = Callable[[], Mapping[str, Sequence[Tensor]]]
"""Tensors whose kind is known, by kind."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The moment at which most memory was in use."""

    total: int
    """Bytes; on an accelerator as its allocator counts them, which sees inside operations."""
    device: torch.device
    phase: str
    module: str | None
    """The path of the module that was running, "" for the model itself; None: none was."""
    module_type: str | None
    """The name of its class."""
    operation: str
    kinds: Mapping[str, int]
    """Bytes by kind."""
    activations: Mapping[str, int]
    """Bytes of activations by the path of the module that made them, most first; NOBODY is what the script made."""


class MemoryProfiler:
    """Looks at a model from `start` to `stop`; a `with` block is both.

    `kinds` tells what parameters, gradients, states and buffers there are; by default those of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Kinds | None = None,
        device: torch.device | None = None,
        elsewhere: Container[torch.UntypedStorage] = (),
    ) -> None:
        self.model = model
        self.changes: list[MemoryChange] = []
        """What came and went in the last `start` to `stop`, where `keep_changes` was asked for."""
        self._elsewhere = elsewhere
        self._kinds = kinds or (lambda: _of_model(model))
        self._given = device
        self._account: TensorLedger | None = None
        self._where: ModuleTracker | None = None
        self._handles: list[Any] = []
        self._device = torch.device("cpu")

    @property
    def running(self) -> bool:
        """Between `start` and `stop`."""
        return self._where is not None

    def start(self, *, keep_changes: bool = False) -> None:
        """Begin; an accelerator's peaks are counted anew from here."""
        if self.running:
            raise UsageError("MemoryProfiler.start: it is running already; call stop() first")
        self._device = self._given or next((param.device for param in self.model.parameters()), torch.device("cpu"))
        self._where = ModuleTracker(self.model)
        counts = self._device.type != "cpu"
        device, index = get_accelerator(), self._device.index
        most = (lambda: int(device.max_memory_allocated(index))) if counts else None
        self._account = TensorLedger(self._device, self._where.now, most, self._elsewhere)
        if keep_changes:
            self._account.changes = self.changes = []
        if counts:
            device.reset_peak_memory_stats(index)
        self.name_kinds()
        for param in self.model.parameters():
            if param.requires_grad:
                self._handles.append(param.register_hook(self._gradient))
        self._account.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End; `peak` stays. Stopping twice is harmless."""
        if self._account is None or self._where is None:
            return
        leave(self._account)
        self.name_kinds()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._where.close()
        self._where = None
        self._account.close()

    def forget(self) -> None:
        """End, as if nothing had been looked at."""
        self.stop()
        self._account = None

    def __enter__(self) -> MemoryProfiler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def enter_phase(self, phase: str) -> None:
        """What follows belongs to this phase, until `leave_phase`."""
        if self._where is not None:
            self._where.enter(phase)

    def leave_phase(self) -> None:
        """The innermost phase is over."""
        if self._where is not None and self._account is not None:
            self.name_kinds()
            self._account.look(self._where.now(), "")
            self._where.leave()

    def name_kinds(self) -> None:
        """Look again at what has become of the model's memory."""
        if self._account is not None:
            self._account.name(self._kinds())

    def name_made(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """These tensors are of this kind, unless they are known as something else."""
        if self._account is not None:
            self._account.name_made(kind, tensors)

    @property
    def peak(self) -> MemoryPeak | None:
        """The moment at which most memory was in use so far; None before anything was computed."""
        moment = None if self._account is None else self._account.moment
        if moment is None:
            return None
        kinds: Counter[str] = Counter(dict.fromkeys((*self._kinds(), ACTIVATIONS), 0))
        makers: Counter[str] = Counter()
        for held in moment.alive:
            kinds[held.kind] += held.nbytes
            if held.kind == ACTIVATIONS and held.nbytes:
                makers[NOBODY if held.module is None else held.module] += held.nbytes
        kinds[OTHERS] += max(moment.total - kinds.total(), 0)
        place = moment.place
        running = None if place.module is None else self.model.get_submodule(place.module)
        return MemoryPeak(
            total=moment.total,
            device=self._device,
            phase=place.phase,
            module=place.module,
            module_type=None if running is None else type(running).__name__,
            operation=moment.operation,
            kinds=dict(kinds),
            activations=dict(makers.most_common()),
        )

    def _gradient(self, gradient: Tensor) -> None:
        if self._account is not None:
            self._account.name({"gradients": [gradient]})


def _of_model(model: nn.Module) -> Mapping[str, Sequence[Tensor]]:
    params = list(model.parameters())
    return {
        PARAMETERS: params,
        "gradients": [param.grad for param in params if param.grad is not None],
        "buffers of the model": list(model.buffers()),
    }


class StepMemory:
    """Looks from the end of the step before to the end of the step, and prints then; in a pipeline for every stage."""

    def __init__(
        self, profiler: MemoryProfiler, section: MemoryProfilerConfig, stages: StageGroup | None = None
    ) -> None:
        self.profiler = profiler
        self._stages = stages
        self._section = section
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> StepMemory:
        """Wait for the step."""
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            events.subscribe(PhaseFailed, self._phase_failed),
            events.subscribe(RunContinued, self._run_continued),
            events.subscribe(StepFinished, self._step_finished),
        ):
            self._subscriptions.callback(subscription.close)
        self._reached(0)
        return self

    def close(self) -> None:
        """Stop waiting, and looking."""
        self._subscriptions.close()
        self.profiler.stop()

    @property
    def peak(self) -> MemoryPeak | None:
        """The moment of the step at which most memory was in use; None before the step."""
        return self.profiler.peak

    def report(self) -> list[str]:
        """What is known so far, as lines; none before anything was computed."""
        if (peak := self.peak) is None:
            return []
        head = f"Memory at the peak of step {self._section.profile_step}"
        return [head, *lines(peak, self._section.top_modules)]

    def _of_all(self) -> list[str]:
        """The report of an engine, or of every stage of a pipeline."""
        if self._stages is None:
            return self.report()
        found: list[list[str]] = self._stages.gather([self._stages.name, *self.report()])
        return [line for one in found for line in one]

    def _phase_began(self, event: PhaseBegan) -> None:
        self.profiler.enter_phase(event.phase.value.partition("_")[0])

    def _phase_finished(self, event: PhaseFinished) -> None:
        self.profiler.leave_phase()

    def _phase_failed(self, event: PhaseFailed) -> None:
        if self.profiler.running:  # the step is still to come otherwise, where a script goes on after an error
            self.close()

    def _run_continued(self, event: RunContinued) -> None:
        self.profiler.forget()  # it looked at another step: at step 0 it begins before a checkpoint is loaded
        self._reached(event.step)

    def _reached(self, step: int) -> None:
        if step == self._section.profile_step:
            self.profiler.start()

    def _step_finished(self, event: StepFinished) -> None:
        if not self.profiler.running:
            self._reached(event.step)
            return
        self.close()
        text = "\n".join(self._of_all())
        if self._stages is not None and not self._stages.prints:
            return
        to_file_or_output(
            "memory_profiler.output_file",
            self._section.output_file,
            lambda file: print_dist(text) if file is None else write_report(text + "\n", file),
        )


def lines(peak: MemoryPeak, top: int) -> list[str]:
    """Where it was, a line for each kind, and the `top` modules whose activations were alive."""
    where = "" if peak.module is None else f", module {peak.module or 'the model'} ({peak.module_type})"
    doing = f", operation {peak.operation}" if peak.operation else ""
    shown = [f"{_size(peak.total)}         on {peak.device} in {peak.phase}{where}{doing}"]
    shown += [f"{_size(nbytes)}  {nbytes / max(peak.total, 1):>5.0%}  {kind}" for kind, nbytes in peak.kinds.items()]
    if peak.activations:
        shown.append("Activations that were alive, by the module that made them:")
        shown += [f"{_size(nbytes)}  {name or 'the model'}" for name, nbytes in list(peak.activations.items())[:top]]
        left = list(peak.activations.values())[top:]
        if left:
            shown.append(f"{_size(sum(left))}  {len(left)} more")
    return shown


def _size(nbytes: int) -> str:
    unit, size = next((pair for pair in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= pair[1]), ("KiB", 2**10))
    return f"{nbytes / size:9.2f} {unit}"
