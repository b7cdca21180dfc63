"""`FlopsProfiler` and `get_model_profile`, as scripts call them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config.monitor import FlopsProfilerConfig
from deepspeed.errors import UsageError
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFailed, PhaseFinished, RunContinued, StepFinished
from deepspeed.profiling.common import StageGroup, to_file_or_output, write_report
from deepspeed.profiling.flops_profiler.count import ModuleProfile, params_of, wrapFunc
from deepspeed.profiling.flops_profiler.report import (
    Facts,
    Stage,
    aggregated,
    detailed,
    facts_of,
    number_to_string,
    params_to_string,
    summary,
)
from deepspeed.profiling.timers import TIMER_NAMES, WallClock

__all__ = ["FlopsProfiler", "get_model_profile", "wrapFunc"]


class FlopsProfiler:
    """Counts the operations of a model's forward passes between `start_profile` and `stop_profile`, module by module.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(batch)
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        """Tells a report of the job: ranks, batch sizes, and with wall_clock_breakdown the times of its last step."""
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.facts: Facts | None = None
        """What is known of the job, where an engine tells it."""
        self.flops = self.macs = self.params = 0
        """Of the last profile, also when it was ended."""
        self.profile: ModuleProfile | None = None
        """Of the modules, until `end_profile`."""

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Begin to count from zero; modules of the ignored types count for what calls them."""
        if self.started:
            raise UsageError("start_profile: this profiler is running; call stop_profile first")
        wrong = [kind for kind in ignore_list or () if not isinstance(kind, type)]
        if wrong:
            raise UsageError(f"start_profile: {wrong[0]!r} is no type of module to ignore; give classes, as nn.Dropout")
        self.end_profile()
        self.profile = ModuleProfile(self.model, ignore_list or ())
        self.started = True

    def resume_profile(self) -> None:
        """Count further passes, on top of what was counted before `stop_profile`."""
        if self.started or self.profile is None:
            raise UsageError("resume_profile: there is no profile that was stopped; call start_profile")
        self.profile.open()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; what was counted can be read and printed."""
        if self.profile is not None:
            self.profile.close()
            self.flops, self.macs = self.get_total_flops(), self.get_total_macs()
            self.params = self.get_total_params()
        self.started = False

    def reset_profile(self) -> None:
        """Begin to count from zero again."""
        if self.profile is not None:
            self.profile.reset()

    def end_profile(self) -> None:
        """Stop counting and forget what was counted; the model is as it was."""
        if self.profile is not None:
            self.profile.close()
        self.profile, self.started = None, False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of all forward passes."""
        total = 0 if self.profile is None else int(self.profile.flops(self.model))
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with an addition among them."""
        total = 0 if self.profile is None else int(self.profile.macs(self.model))
        return number_to_string(total, "MACs") if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of all forward passes, with the measuring in them."""
        total = 0.0 if self.profile is None else self.profile.duration(self.model)
        return number_to_string(total, "s") if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, whole where they are spread over ranks."""
        total = params_of(self.model)
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print numbers of the whole, the heaviest modules, and with `detailed` the whole tree; or write that."""
        profile = self._measured("print_model_profile")
        facts = self.facts or facts_of(self.ds_engine, self.recompute_fwd_factor)
        lines = summary(profile, facts, profile_step)
        for stage in facts.stages:
            lines += stage.modules
        if not facts.stages:
            lines += self.modules_profile(module_depth, top_modules, detailed)
        text = "\n".join([*lines, "-" * 78]) + "\n"
        if output_file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        write_report(text, output_file)

    def modules_profile(self, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> list[str]:
        """The heaviest modules, and with `detailed` the whole tree, as lines."""
        if module_depth < -1 or top_modules < 1:
            raise UsageError(
                f"FlopsProfiler: module_depth is {module_depth} and top_modules {top_modules}; expected a depth "
                "from 0, or -1 for all of them, and at least 1 module"
            )
        profile = self._measured("modules_profile")
        lines = aggregated(profile, module_depth, top_modules)
        return lines + (_detailed(profile) if detailed else [])

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the heaviest modules alone."""
        sys.stdout.write("\n".join(self.modules_profile(module_depth, top_modules, detailed=False)) + "\n")

    def _measured(self, caller: str) -> ModuleProfile:
        if self.profile is None:
            raise UsageError(f"{caller}: nothing was profiled; call start_profile and run the model first")
        return self.profile


_detailed = detailed  # a parameter of print_model_profile has the same name


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, MACs, params) of one call of the model, in eval mode, with random input or with `args` and `kwargs`.

    `mode` "generate" calls `model.generate` instead of the model. `warm_up` calls come before.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f'get_model_profile: mode is {mode!r}; expected "forward" or "generate"')
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs or {}, dict):
        raise UsageError(
            f"get_model_profile: args is a {type(args).__name__} and kwargs a {type(kwargs).__name__}; expected a list "
            "of the positional arguments, such as args=[tensor], and a dict of those with names"
        )
    given, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        if given or named:
            raise UsageError("get_model_profile: expected either input_shape, or args and kwargs; found both")
        given = [_random_input(model, input_shape)]
    if not given and not named:
        raise UsageError("get_model_profile: expected input_shape, args or kwargs; found none of them")
    call = model if mode == "forward" else getattr(model, "generate", None)
    if call is None:
        raise UsageError(f'get_model_profile: mode is "generate", but {type(model).__name__} has no method generate()')
    profiler, training = FlopsProfiler(model), {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*given, **named)
            profiler.start_profile(ignore_modules)
            call(*given, **named)
            profiler.stop_profile()
        found = (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string))
        params = profiler.get_total_params(as_string)
        if print_profile:
            profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
        for module, trains in training.items():  # parts of a model may be in another mode than the whole
            module.training = trains
    return *found, params


def _random_input(model: nn.Module, shape: Sequence[int]) -> torch.Tensor:
    if not isinstance(shape, (tuple, list)) or len(shape) < 1 or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise UsageError(f"get_model_profile: input_shape is {shape!r}; expected sizes, such as (1, 3, 224, 224)")
    example = next((param for param in model.parameters() if param.is_floating_point()), None)
    device = get_accelerator().current_device_name() if example is None else example.device
    dtype = torch.float32 if example is None else example.dtype
    return torch.rand(tuple(shape), device=device, dtype=dtype)


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
