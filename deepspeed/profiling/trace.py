"""The `trace` section: torch's profiler over a few steps, a file per rank, and one for all of them.

`python -m deepspeed.profiling.trace FOLDER` joins files that ranks without a common file system wrote.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from deepspeed.config.monitor import TraceConfig
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFailed, PhaseFinished, RunContinued, StepFinished
from deepspeed.log import logger

MERGED = "trace.json"
_PER_RANK = 1000  # numbers of processes and devices that each rank has in the merged trace
_MEMORY = "[memory]"


class StepTrace:
    """Traces from the end of the step before the first one to the end of the last one, on one rank."""

    def __init__(self, section: TraceConfig, rank: int, kinds: Callable[[], Mapping[str, int]]) -> None:
        self._section, self._rank, self._kinds = section, rank, kinds
        self._folder = Path(section.folder)
        self._profile: Any = None
        self._step = 0
        self._memory: list[tuple[int, dict[str, int]]] = []
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> StepTrace:
        """Wait for the first step."""
        _file(self._folder, self._rank).unlink(missing_ok=True)  # else it would be taken for one of this run
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            events.subscribe(PhaseFailed, lambda event: self.close()),
            events.subscribe(StepFinished, self._step_finished),
            events.subscribe(RunContinued, self._run_continued),
        ):
            self._subscriptions.callback(subscription.close)
        self._reached(0)
        return self

    def close(self) -> None:
        """Write what was traced so far, and stop."""
        self._subscriptions.close()
        self._finish()

    def _reached(self, step: int) -> None:
        """So many steps are over."""
        first, last = self._section.steps
        if self._profile is None and first <= step <= last:
            activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
            memory, stack = self._section.memory, self._section.stack
            self._profile = profile(activities=list(activities), profile_memory=memory, with_stack=stack)
            self._profile.start()
        elif step > last:
            self.close()

    def _run_continued(self, event: RunContinued) -> None:
        self._step = event.step
        if self._profile is None:
            self._reached(event.step)

    def _step_finished(self, event: StepFinished) -> None:
        self._step = event.step

    def _phase_began(self, event: PhaseBegan) -> None:
        self._look()

    def _phase_finished(self, event: PhaseFinished) -> None:
        self._look()
        if event.phase is Phase.STEP:  # its range is complete only now
            self._reached(self._step)

    def _look(self) -> None:
        if self._profile is not None and self._section.memory:
            self._memory.append((time.time_ns(), dict(self._kinds())))

    def _finish(self) -> None:
        traced, self._profile = self._profile, None
        if traced is None:
            return
        traced.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = _file(self._folder, self._rank)
            raw = file.with_suffix(".raw")
            traced.export_chrome_trace(str(raw))
            _write(file, shaped(json.loads(raw.read_bytes()), self._rank, self._memory))
            raw.unlink()
            found = [_file(self._folder, rank) for rank in sorted(set(self._section.ranks))]
            if all(each.exists() for each in found):  # this rank is the last one
                merge(found, self._folder / MERGED)
        except OSError as error:
            logger.warning("trace.folder: the trace cannot be written to %r (%s)", self._section.folder, error)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"trace.rank{rank:05d}.json"


def _write(file: Path, trace: Mapping[str, Any]) -> None:
    """A file that another rank sees is complete."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(trace), encoding="utf-8")
    part.replace(file)


def shaped(trace: Mapping[str, Any], rank: int, kinds: Iterable[tuple[int, Mapping[str, int]]]) -> dict[str, Any]:
    """A trace of torch's, with process numbers of this rank, and memory as curves. `kinds`: (ns since 1970, bytes)."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    numbers: dict[Any, int] = {}

    def number(process: Any) -> int:
        return rank * _PER_RANK + numbers.setdefault(process, len(numbers))

    events = []
    for given in trace["traceEvents"]:
        event = dict(given)
        if event.get("name") == _MEMORY:
            event = _curve(event)
        if "pid" in event:
            event["pid"] = number(event["pid"])
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
        events.append(event)
    process = number("memory by kind")
    events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"rank {rank}: memory by kind"}})
    events += [
        {"ph": "C", "name": "memory by kind", "pid": process, "tid": 0, "ts": (at - base) / 1e3, "args": dict(each)}
        for at, each in kinds
    ]
    return {"baseTimeNanoseconds": base, "displayTimeUnit": "ms", "rank": rank, "traceEvents": events}


def _curve(event: Mapping[str, Any]) -> dict[str, Any]:
    """What an allocation tells, as a point of a curve."""
    told = event.get("args", {})
    device = "host" if told.get("Device Type") == 0 else f"device {told.get('Device Id')}"
    return {
        **{name: event[name] for name in ("pid", "tid", "ts") if name in event},
        "ph": "C",
        "name": f"memory of the {device}",
        "args": {"allocated": told.get("Total Allocated", 0)},
    }


def merge(files: Sequence[Path], target: Path) -> None:
    """One trace of several ranks' files, on one clock: that of their hosts. One file at a time is in memory."""
    loaded = (json.loads(file.read_bytes()) for file in files)
    base: int | None = None
    part = target.with_suffix(f".{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as out:
        for trace in loaded:
            begin = int(trace["baseTimeNanoseconds"])
            if base is None:
                base = begin
                out.write(f'{{"baseTimeNanoseconds": {base}, "displayTimeUnit": "ms", "traceEvents": [\n{{}}')
            for event in trace["traceEvents"]:
                if "ts" in event:
                    event["ts"] = float(event["ts"]) + (begin - base) / 1e3
                out.write(",\n" + json.dumps(event))
        out.write("\n]}\n")
    part.replace(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the traces of a folder."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    files = sorted(Path(given[0]).glob("trace.rank?????.json")) if len(given) == 1 else []
    if not files:
        sys.stderr.write("usage: python -m deepspeed.profiling.trace FOLDER, with files trace.rank*.json in it\n")
        return 2
    target = Path(given[0]) / MERGED
    merge(files, target)
    sys.stdout.write(f"{target}: {len(files)} ranks\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
