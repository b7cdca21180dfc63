"""`StepProfile`: the profile of one step of an engine, as the config's `flops_profiler` section asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from torch import nn

from deepspeed.config.monitor import FlopsProfilerConfig
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFailed, PhaseFinished, RunContinued, StepFinished
from deepspeed.profiling.common import StageGroup, to_file_or_output
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.profiling.flops_profiler.report import Facts, Stage
from deepspeed.profiling.timers import TIMER_NAMES, WallClock


class StepProfile:
    """Counts the first forward pass of the step, and prints when the step is over.

    In a pipeline each rank counts the first micro-batch in all of its stages, and the first rank prints for all.

    Counting waits for the device at every module, so that the latencies in the report are those of the step before,
    if there was one.
    """

    def __init__(
        self,
        module: nn.Module,
        section: FlopsProfilerConfig,
        facts: Callable[[], Facts],
        stages: StageGroup | None = None,
    ) -> None:
        self.profiler = FlopsProfiler(module, recompute_fwd_factor=section.recompute_fwd_factor)
        self._section = section
        self._facts = facts
        self._steps = 0
        self._stages = stages
        self._passes = 1 if stages is None else stages.passes
        self._left = self._passes
        self._micro_step = 0
        self._times: Mapping[Phase, float] = {}
        self._iteration = 0.0
        self._began: float | None = None
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream, clock: WallClock) -> StepProfile:
        """Wait for the step."""
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            events.subscribe(PhaseFailed, self._phase_failed),
            events.subscribe(RunContinued, self._run_continued),
            clock.listen(self._step_timed),
        ):
            self._subscriptions.callback(subscription.close)
        return self

    def close(self) -> None:
        """Stop waiting; the model is as it was."""
        self._subscriptions.close()
        self.profiler.end_profile()

    def _phase_began(self, event: PhaseBegan) -> None:
        if self._began is None:
            self._began = time.perf_counter()
        if event.phase is not Phase.FORWARD or self._steps != self._section.profile_step or not self._left:
            return
        if self._left == self._passes:
            self._micro_step = event.micro_step
            self.profiler.start_profile()
        elif event.micro_step == self._micro_step:
            self.profiler.resume_profile()

    def _phase_finished(self, event: PhaseFinished) -> None:
        if event.phase is Phase.FORWARD and self.profiler.started:
            self.profiler.stop_profile()
            self._left -= 1

    def _phase_failed(self, event: PhaseFailed) -> None:
        """What failed is counted anew, if it is tried again."""
        self._left, self._began = self._passes, None
        self.profiler.end_profile()

    def _run_continued(self, event: RunContinued) -> None:
        """What was counted of a step that a checkpoint put an end to is forgotten."""
        self._steps, self._left, self._began = event.step, self._passes, None
        self.profiler.end_profile()

    def _step_timed(self, event: StepFinished, times: Mapping[Phase, float]) -> None:
        profiled = not self._left and self._steps == self._section.profile_step
        self._steps = event.step
        if not self._times or not profiled:
            self._times = dict(times)
            self._iteration = 0.0 if self._began is None else time.perf_counter() - self._began
        self._began = None
        if profiled:
            self._report()
            self._subscriptions.close()

    def _report(self) -> None:
        phases = {TIMER_NAMES[phase]: took / 1e3 for phase, took in self._times.items()}
        facts = replace(self._facts(), phases=phases, recompute=self._section.recompute_fwd_factor)
        if self._stages is not None:
            facts = replace(facts, stages=tuple(self._of_all(self._stages, phases)), iteration=self._iteration)
        if self._stages is None or self._stages.prints:
            self._print(facts)
        self.profiler.end_profile()

    def _of_all(self, stages: StageGroup, phases: Mapping[str, float]) -> list[Stage]:
        section, profiler = self._section, self.profiler
        modules = profiler.modules_profile(section.module_depth, section.top_modules, section.detailed)
        head = ["", f"{'=' * 26} {stages.name} {'=' * 26}"]
        params = profiler.params - stages.counted_elsewhere()
        found: list[Stage] = stages.gather(
            Stage(params, profiler.macs, profiler.flops, dict(phases), [*head, *modules])
        )
        return found

    def _print(self, facts: Facts) -> None:
        self.profiler.facts, section = facts, self._section

        def show(output_file: str | None) -> None:
            self.profiler.print_model_profile(
                profile_step=section.profile_step,
                module_depth=section.module_depth,
                top_modules=section.top_modules,
                detailed=section.detailed,
                output_file=output_file,
            )

        to_file_or_output("flops_profiler.output_file", section.output_file, show)
