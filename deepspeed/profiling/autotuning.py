"""A run of the autotuner, seen from inside: measures the steps of the window, writes a file, and ends the process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.clock import CudaEventTimer, mark
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFailed, PhaseFinished, StepFinished
from deepspeed.log import logger
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

_MEASURED = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
PROGRESS = ".steps"
"""Ending of the file, next to that of the metrics, that holds how many steps are over."""


@dataclass(frozen=True)
class RunSize:
    """Sizes of a step."""

    train: int
    micro: int
    steps: int


def write_whole(file: Path, values: Mapping[str, Any]) -> None:
    """A JSON file that is there as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(part, file)


class TuningRun:
    """Counts operations in the step before the window; device and host meet only at both ends of the window.

    Every rank leaves with status 0 after the same step, in the middle of the script's loop; rank 0 writes.
    """

    def __init__(
        self,
        section: DeepSpeedAutotuningConfig,
        module: nn.Module,
        sizes: Callable[[], RunSize],
        parameters: Callable[[], tuple[int, int]],
        *,
        writes: bool,
    ) -> None:
        self._section, self._sizes, self._parameters, self._writes = section, sizes, parameters, writes
        self._profiler = FlopsProfiler(module)
        self._steps, self._flops = 0, 0
        self._counted: int | None = None
        self._began = 0.0
        self._open: dict[Phase, Any] = {}
        self._phases: dict[Phase, list[CudaEventTimer]] = {phase: [] for phase in _MEASURED}
        self._activations = [0, 0]
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream) -> TuningRun:
        """Wait for the window."""
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            events.subscribe(PhaseFailed, lambda event: self._profiler.end_profile()),
            events.subscribe(StepFinished, self._step_finished),
        ):
            self._subscriptions.callback(subscription.close)
        self._tell_progress()
        return self

    def close(self) -> None:
        """Stop waiting; the model is as it was."""
        self._subscriptions.close()
        self._profiler.end_profile()

    def _phase_began(self, event: PhaseBegan) -> None:
        first = self._steps == 0 and event.micro_step == 0
        if event.phase is Phase.FORWARD and first and self._section.model_info.profile:
            self._activations[0] = get_accelerator().memory_allocated()
        if event.phase is Phase.FORWARD and self._steps == self._section.start_profile_step - 1:
            if self._counted is None:
                self._counted = event.micro_step
                self._profiler.start_profile()
            elif self._counted == event.micro_step:  # another stage of a pipeline on this rank
                self._profiler.resume_profile()
        if event.phase in _MEASURED:
            self._open[event.phase] = mark()

    def _phase_finished(self, event: PhaseFinished) -> None:
        if event.phase is Phase.FORWARD and self._profiler.started:
            self._profiler.stop_profile()
            self._flops = self._profiler.get_total_flops()
        if event.phase is Phase.FORWARD and self._steps == 0 and event.micro_step == 0:
            self._activations[1] = get_accelerator().memory_allocated()
        begin = self._open.pop(event.phase, None)
        if begin is not None and self._steps >= self._section.start_profile_step:
            self._phases[event.phase].append(CudaEventTimer(begin, mark()))

    def _step_finished(self, event: StepFinished) -> None:
        self._steps += 1
        self._tell_progress()
        if self._section.model_info.profile:
            self._leave(Path(self._section.model_info_path), self._model_info)
        if self._steps == self._section.start_profile_step:
            self._profiler.end_profile()
            self._began = _now()
        elif self._steps == self._section.end_profile_step + 1:
            self._leave(Path(self._section.metric_path), self._metrics)

    def _tell_progress(self) -> None:
        if self._writes:
            file = Path(self._section.metric_path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(PROGRESS).write_text(str(self._steps), encoding="ascii")

    def _leave(self, file: Path, found: Callable[[], Mapping[str, Any]]) -> None:
        values = found()
        if self._writes:
            write_whole(file, values)
            logger.info("autotuning wrote %s after step %d, and ends this run", file, self._steps)
        self.close()
        sys.exit(0)

    def _model_info(self) -> dict[str, Any]:
        parameters, trained = self._parameters()
        return {
            "num_params": parameters,
            "trainable_num_params": trained,
            "activation_mem_per_gpu": max(self._activations[1] - self._activations[0], 0),
            "max_mem_per_gpu": get_accelerator().max_memory_allocated(),
            "train_micro_batch_size_per_gpu": self._sizes().micro,
        }

    def _metrics(self) -> dict[str, Any]:
        seconds, sizes = _now() - self._began, self._sizes()
        steps = self._section.end_profile_step + 1 - self._section.start_profile_step
        means = {
            phase.value: sum(each.get_elapsed_msec() for each in found) / steps for phase, found in self._phases.items()
        }
        flops = 3 * self._flops * sizes.steps * steps  # backward counts as two forwards
        return {
            "throughput": sizes.train * steps / seconds,
            "latency": seconds / steps * 1e3,
            "FLOPS_per_gpu": flops / seconds,
            **means,
            "steps": steps,
            "train_batch_size": sizes.train,
            "train_micro_batch_size_per_gpu": sizes.micro,
            "gradient_accumulation_steps": sizes.steps,
            "num_params": self._parameters()[0],
            "max_mem_per_gpu": get_accelerator().max_memory_allocated(),
        }


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
