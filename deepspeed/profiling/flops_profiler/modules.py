"""What each module did: its own work, the time from its begin to its end, its parameters."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.flops_profiler.count import Counter, Work

__all__ = ["Hooks", "get_module_duration", "get_module_flops", "get_module_macs", "params_of"]

_ATTRIBUTE = "__ds_profile__"
"""Of a module: its record in each profile, by the profile's number, the one that began last behind all others."""


@dataclass(slots=True)
class Record:
    """One module."""

    flops: float = 0.0
    macs: float = 0.0
    duration: float = 0.0
    began: list[float] = field(default_factory=list)
    """One entry for each call that has not ended: a module may call itself."""


class Hooks:
    """Measures a model from construction to `close`; records stay at the modules until `forget`."""

    def __init__(self, model: nn.Module, ignore: Collection[type[nn.Module]] = ()) -> None:
        self._model = model
        self._ignore = tuple(ignore)
        self._running: list[Record] = []
        self._handles: list[Any] = []
        self.number = id(self)
        """Tells the records of this profile from those of others that run at the same time."""
        self.reset()
        _load_formulas()
        self.open()

    def open(self) -> None:
        """Go on measuring after `close`; what was measured stays."""
        for module in self._model.modules():
            if self._ignore and isinstance(module, self._ignore):
                continue
            self._handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        self._counter = Counter(self._add)
        self._counter.begin()

    def close(self) -> None:
        """Stop measuring; closing twice is harmless."""
        if self._handles:
            self._counter.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    def forget(self) -> None:
        """Remove every trace from the model."""
        self.close()
        for module in self._model.modules():
            records = module.__dict__.get(_ATTRIBUTE, {})
            records.pop(self.number, None)
            if not records:
                module.__dict__.pop(_ATTRIBUTE, None)

    def reset(self) -> None:
        """Begin to count from zero."""
        for module in self._model.modules():
            records = module.__dict__.setdefault(_ATTRIBUTE, {})
            records.pop(self.number, None)
            records[self.number] = Record()
        self._running.clear()

    def _add(self, work: Work) -> None:
        if self._running:
            self._running[-1].flops += work[0]
            self._running[-1].macs += work[1]

    def _begin(self, module: nn.Module, *_: Any) -> None:
        record = self._record(module)
        get_accelerator().synchronize()
        record.began.append(time.perf_counter())
        self._running.append(record)

    def _end(self, module: nn.Module, *_: Any) -> None:
        record = self._record(module)
        if not record.began:
            return
        get_accelerator().synchronize()
        took = time.perf_counter() - record.began.pop()
        if not record.began:  # a call inside a call of the same module is part of it
            record.duration += took
        while self._running and self._running.pop() is not record:
            pass  # modules that ended by an exception

    def _record(self, module: nn.Module) -> Record:
        records: dict[int, Record] = module.__dict__.setdefault(_ATTRIBUTE, {})
        return records.setdefault(self.number, Record())


def _load_formulas() -> None:
    """Let torch load what its first formula needs, which takes seconds, before anything is timed."""
    with Counter(lambda _: None):
        torch.mm(torch.ones(1, 1, device="cpu"), torch.ones(1, 1, device="cpu"))


def _record(module: nn.Module, profile: int | None) -> Record:
    """Of one profile, or of the last that began; an empty one where there is none."""
    records: dict[int, Record] = module.__dict__.get(_ATTRIBUTE, {})
    if profile is None:
        profile = next(reversed(records), None)
    return records.get(profile, Record()) if profile is not None else Record()


def get_module_flops(module: nn.Module, profile: int | None = None) -> float:
    """Operations of a module and all inside it, in the profile of this number, or the last that began."""
    return sum(_record(inner, profile).flops for inner in module.modules())


def get_module_macs(module: nn.Module, profile: int | None = None) -> float:
    """Multiplications with an addition of a module and all inside it."""
    return sum(_record(inner, profile).macs for inner in module.modules())


def get_module_duration(module: nn.Module, profile: int | None = None) -> float:
    """Seconds from begin to end of a module; of one that is only a container, those of what it contains."""
    own = _record(module, profile).duration
    return own or sum(get_module_duration(child, profile) for child in module.children())


def params_of(module: nn.Module) -> int:
    """Parameters of a module and all inside it, each once; those that are spread over ranks are counted whole."""
    return sum(int(getattr(param, "ds_numel", param.numel())) for param in module.parameters())
