"""`StepMemory`: the peak of one step of an engine, as the config's `memory_profiler` section asks for it."""

from __future__ import annotations

from contextlib import ExitStack

from deepspeed.config.profiling import MemoryProfilerConfig
from deepspeed.events import EventStream, PhaseBegan, PhaseFailed, PhaseFinished, RunContinued, StepFinished
from deepspeed.log import print_dist
from deepspeed.profiling.memory_profiler.profiler import MemoryPeak, MemoryProfiler
from deepspeed.profiling.memory_profiler.report import lines
from deepspeed.profiling.report_file import to_file_or_output, write_report
from deepspeed.profiling.stages import StageGroup

__all__ = ["StepMemory"]


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
