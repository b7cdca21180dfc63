"""`MemoryProfiler`: what was alive when a model needed most memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.profiling.memory_profiler.account import ELASTIC, OTHERS, Account
from deepspeed.profiling.memory_profiler.whereabouts import ACTIVATIONS, Whereabouts
from deepspeed.profiling.modes import leave

__all__ = ["NOBODY", "Kinds", "MemoryPeak", "MemoryProfiler"]

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

    def __init__(self, model: nn.Module, kinds: Kinds | None = None, device: torch.device | None = None) -> None:
        self.model = model
        self._kinds = kinds or (lambda: _of_model(model))
        self._given = device
        self._account: Account | None = None
        self._where: Whereabouts | None = None
        self._handles: list[Any] = []
        self._device = torch.device("cpu")

    @property
    def running(self) -> bool:
        """Between `start` and `stop`."""
        return self._where is not None

    def start(self) -> None:
        """Begin; an accelerator's peaks are counted anew from here."""
        if self.running:
            raise UsageError("MemoryProfiler.start: it is running already; call stop() first")
        self._device = self._given or next((param.device for param in self.model.parameters()), torch.device("cpu"))
        self._where = Whereabouts(self.model)
        counts = self._device.type != "cpu"
        self._account = Account(self._device, self._where.now, self._peak_of_allocator if counts else None)
        if counts:
            get_accelerator().reset_peak_memory_stats(self._device.index)
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

    def _peak_of_allocator(self) -> int:
        return int(get_accelerator().max_memory_allocated(self._device.index))


def _of_model(model: nn.Module) -> Mapping[str, Sequence[Tensor]]:
    params = list(model.parameters())
    return {
        ELASTIC: params,
        "gradients": [param.grad for param in params if param.grad is not None],
        "buffers of the model": list(model.buffers()),
    }
