"""Progress for people: the line every `steps_per_print` steps, and a progress bar for scripts.

Both write to standard output on rank 0, not to the library's logger: the logger is quiet by default, and
`steps_per_print` asks for the line.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.events import EventStream, StepFinished
from deepspeed.log import get_dist_msg
from deepspeed.profiling.throughput import Throughput

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_GB = 1024**3
_REDRAW_SECONDS = 0.1


def short(number: float) -> str:
    """A number as a person reads it: 0.00123, 12.3, 1.23k, 45.6M."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 0.9995 * unit <= abs(number) < math.inf:  # 999.9 rounds to 1k, not to 1e+03
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def _number(value: Any) -> float:
    """A number on the host; a tensor of several values is its mean, and waiting for it is paid here."""
    if isinstance(value, torch.Tensor):
        return float(value.detach().float().mean().item())
    return float(value)


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class StepLine:
    """One line about every `every`-th step: what a person looks at to see whether training goes well.

    The only wait for the device is in the steps that are shown. A `Throughput` given here should be attached
    first, so that the line tells of the step it names.
    """

    def __init__(
        self,
        every: float | None,
        *,
        throughput: Throughput | None = None,
        write: Callable[[str], None] = _write_line,
    ) -> None:
        self._every = every if every is not None and math.isfinite(every) and every >= 1 else None
        self._throughput = throughput
        self._write = write
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> StepLine:
        """Start writing; nothing listens on other ranks than 0, nor if no step is ever shown."""
        if self._every is not None and get_dist_msg("") is not None:
            self._subscriptions.callback(events.subscribe(StepFinished, self._step_finished).close)
        return self

    def close(self) -> None:
        """Stop writing."""
        self._subscriptions.close()

    def _step_finished(self, event: StepFinished) -> None:
        if self._every is not None and event.step % self._every == 0:
            self._write(" | ".join([*_of_step(event), *self._rate(), _memory()]))

    def _rate(self) -> list[str]:
        samples = None if self._throughput is None else self._throughput.current_samples_per_second
        return [] if samples is None else [f"{short(samples)} samples/s"]


def _of_step(event: StepFinished) -> list[str]:
    parts = [f"step {event.step}"]
    if event.loss is not None:
        parts.append(f"loss {_number(event.loss):.4f}")
    rates = dict.fromkeys(event.lr)
    if rates:
        parts.append("lr " + ", ".join(f"{lr:.3g}" for lr in rates))
    if event.grad_norm is not None:
        parts.append(f"grad norm {_number(event.grad_norm):.3g}")
    if event.loss_scale is not None:
        parts.append(f"loss scale {event.loss_scale:g}")
    if event.skipped_steps:
        now = "" if event.applied else ", this one too"
        parts.append(f"skipped {event.skipped_steps}{now}")
    return parts


def _memory() -> str:
    device = get_accelerator()
    return f"memory {device.memory_allocated() / _GB:.2f} GB, peak {device.max_memory_allocated() / _GB:.2f} GB"


class ProgressBar:
    """A bar on a terminal, else `lines` plain lines over the whole run; rank 0 only.

        with ProgressBar(total=1000, description="training") as bar:
            for batch in loader:
                ...
                bar.update(loss=loss, tokens_per_s=rate)

    Fields may be tensors: they are read only when they are drawn, at most ten times a second. A `StepLine`
    appears above the bar.
    """

    def __init__(
        self, total: int, *, description: str = "", unit: str = "step", lines: int = 20, terminal: bool | None = None
    ) -> None:
        self._total = total
        self._description = description
        self._unit = unit
        self._every = max(1, math.ceil(total / max(1, lines)))
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._shown = get_dist_msg("") is not None
        self._done = 0
        self._began, self._drawn = time.perf_counter(), 0.0
        self._bar: tuple[Progress, TaskID] | None = None
        self._subscriptions = ExitStack()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, advance: int = 1, **fields: Any) -> None:
        """So many more are done; the fields are shown as `name value`, with `_per_` read as a slash."""
        before, self._done = self._done, self._done + advance
        if not self._shown:
            return
        last = self._done >= self._total
        if self._terminal:
            self._bar = self._bar or self._open()
            now = time.perf_counter()
            if last or now - self._drawn >= _REDRAW_SECONDS:
                self._drawn = now
                self._bar[0].update(self._bar[1], completed=self._done, fields=_fields(fields))
        elif last or self._done // self._every > before // self._every:
            seconds = time.perf_counter() - self._began
            parts = [f"{self._unit} {self._done}/{self._total}", *_fields(fields).split(" | "), f"{seconds:.0f} s"]
            _write_line(" ".join(filter(None, [self._description, " | ".join(filter(None, parts))])))

    def attach(self, events: EventStream) -> ProgressBar:
        """Advance with every step of an engine, showing loss and learning rate."""
        if self._shown:
            self._subscriptions.callback(events.subscribe(StepFinished, self._step_finished).close)
        return self

    def close(self) -> None:
        """Stop listening and leave the bar as it is."""
        self._subscriptions.close()
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _step_finished(self, event: StepFinished) -> None:
        fields: dict[str, Any] = {} if event.loss is None else {"loss": event.loss}
        if event.lr:
            fields["lr"] = event.lr[0]
        self.update(1, **fields)

    def _open(self) -> tuple[Progress, TaskID]:
        from rich import progress  # slow to import, and of no use without a terminal
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[fields]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=sys.stdout, force_terminal=True),
        )
        bar.start()
        return bar, bar.add_task(self._description or self._unit, total=self._total, fields="")


def _fields(fields: dict[str, Any]) -> str:
    parts = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else short(_number(value))
        parts.append(f"{name.replace('_per_', '/')} {text}")
    return " | ".join(parts)
