"""How far a long step has come: times and device peaks of its phases and layers, printed and kept in a file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allocations import Allocations
from benchmarks.long_arithmetic import GIB

__all__ = ["Notes", "Progress"]


class Notes:
    """A file of what is known so far, written anew with each fact: a run that is cut short has left the last ones."""

    def __init__(self, path: Path | None, **facts: Any) -> None:
        self._path = path
        self.facts: dict[str, Any] = {**facts, "steps": []}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def begin(self, tokens: int) -> None:
        """A new step."""
        self.facts["steps"].append({"tokens": tokens, "phases": [], "layers": []})

    def add(self, kind: str, **fact: Any) -> None:
        """A fact about the newest step: of its "phases" or its "layers"."""
        if self.facts["steps"]:
            self.facts["steps"][-1][kind].append(fact)
            self.write()

    def end(self, **found: Any) -> None:
        """What the whole run has found."""
        self.facts["found"] = found
        self.write()

    def write(self) -> None:
        """Into another file first, so that whoever reads finds a whole one."""
        if self._path is not None:
            beside = self._path.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
            beside.replace(self._path)


class Progress:
    """Times and device peaks of the phases of a step; a line for each layer."""

    def __init__(self, device: str, notes: Notes, *, quiet: bool, counted: Allocations | None = None) -> None:
        import torch

        self._cuda: Any = torch.cuda if device == "cuda" else None
        self._notes, self._quiet, self._counted = notes, quiet, counted
        self._spans = contextlib.ExitStack()
        self._step = 0
        self._began = time.perf_counter()
        self.phase = ""
        self.peaks: dict[str, float] = {}

    def seconds(self) -> float:
        """Since the step began, with the device's work done."""
        if self._cuda:
            self._cuda.synchronize()
        return time.perf_counter() - self._began

    def restart(self, tokens: int) -> None:
        """A new step."""
        self._step += 1
        self._notes.begin(tokens)
        self.peaks.clear()
        self.seconds()
        self._began = time.perf_counter()

    def enter(self, phase: str) -> None:
        """A new phase; the peak of the one before is noted."""
        now = self.seconds()
        if self._cuda and self.phase:
            peak = self._cuda.max_memory_allocated() / GIB
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0.0))
        self._notes.add("phases", begins=phase, at_s=round(now, 2), peaks_gib=dict(self.peaks))
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
        self.phase = phase
        if self._counted is not None:
            self._spans.close()
            self._spans.enter_context(self._counted.span(f"{self._step} {phase}"))
        if not self._quiet:
            print(f"  {now:8.1f} s  {phase}", flush=True)

    def counted(self) -> dict[str, float]:
        """The peaks of the last step's phases, in GiB, as they were counted."""
        phases = ("forward", "loss", "backward", "update")
        assert self._counted is not None, "asked for where blocks are counted"
        return {phase: self._counted.peak(f"{self._step} {phase}") / GIB for phase in phases}

    def close(self) -> None:
        """Nothing comes after the last phase."""
        self._spans.close()

    def watch(self, layers: Sequence[Any]) -> None:
        """Tell when a layer begins, in forward and when it is run again in backward."""

        def hook(number: int) -> Callable[..., None]:
            def tell(*_: Any) -> None:
                held, now = self._cuda.memory_allocated() / GIB if self._cuda else 0.0, self.seconds()
                self._notes.add("layers", phase=self.phase, layer=number, at_s=round(now, 2), held_gib=round(held, 2))
                if not self._quiet:
                    print(f"  {now:8.1f} s  {self.phase}, layer {number}, {held:.1f} GiB", flush=True)

            return tell

        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(hook(number))
