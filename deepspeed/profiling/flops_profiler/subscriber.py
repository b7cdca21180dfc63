"""`StepProfile`: the profile of one step of an engine, as the config's `flops_profiler` section asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from torch import nn

from deepspeed.config.profiling import FlopsProfilerConfig
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished, StepFinished
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.profiling.flops_profiler.report import Facts
from deepspeed.profiling.wall_clock import TIMER_NAMES, WallClock

__all__ = ["StepProfile"]


class StepProfile:
    """Counts the first forward pass of the step, and prints when the step is over.

    Counting waits for the device at every module, so that the latencies which are told are those of the step before,
    if there was one.
    """

    def __init__(self, module: nn.Module, section: FlopsProfilerConfig, facts: Callable[[], Facts]) -> None:
        self.profiler = FlopsProfiler(module, recompute_fwd_factor=section.recompute_fwd_factor)
        self._section = section
        self._facts = facts
        self._steps = 0
        self._times: Mapping[Phase, float] = {}
        self._done = False
        self._subscriptions = ExitStack()

    def attach(self, events: EventStream, clock: WallClock) -> StepProfile:
        """Wait for the step."""
        for subscription in (
            events.subscribe(PhaseBegan, self._phase_began),
            events.subscribe(PhaseFinished, self._phase_finished),
            clock.listen(self._step_timed),
        ):
            self._subscriptions.callback(subscription.close)
        return self

    def close(self) -> None:
        """Stop waiting; the model is as it was."""
        self._subscriptions.close()
        self.profiler.end_profile()

    def _phase_began(self, event: PhaseBegan) -> None:
        if event.phase is Phase.FORWARD and self._steps == self._section.profile_step and not self._done:
            self._done = True
            self.profiler.start_profile()

    def _phase_finished(self, event: PhaseFinished) -> None:
        if event.phase is Phase.FORWARD and self.profiler.started:
            self.profiler.stop_profile()

    def _step_timed(self, event: StepFinished, times: Mapping[Phase, float]) -> None:
        profiled = self._done and self._steps == self._section.profile_step
        self._steps = event.step
        if not self._times or not profiled:
            self._times = dict(times)
        if profiled:
            self._report()
            self._subscriptions.close()

    def _report(self) -> None:
        phases = {TIMER_NAMES[phase]: took / 1e3 for phase, took in self._times.items()}
        self.profiler.facts = replace(self._facts(), phases=phases, recompute=self._section.recompute_fwd_factor)
        self.profiler.print_model_profile(
            profile_step=self._section.profile_step,
            module_depth=self._section.module_depth,
            top_modules=self._section.top_modules,
            detailed=self._section.detailed,
            output_file=self._section.output_file,
        )
        self.profiler.end_profile()
