"""`StepVerifier`: checks every n-th step of an engine, by its events.

[Note: what a check sees] Between the step before and the end of backward states are at rest: their bits may not change.
Before the update, copies on several ranks are compared, and sampled gradients with a second sum. After the update,
sampled parameters are compared with the formula of their optimizer. A fault that lasts, such as copies that went apart,
is found by the next check; one that the next step overwrites is found if it falls into a step that is checked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deepspeed import comm
from deepspeed.errors import VerificationError
from deepspeed.events import EventStream, Phase, PhaseBegan, RunContinued, StepFinished, Subscription
from deepspeed.log import log_dist, logger
from deepspeed.pipe.layers import is_fake_world
from deepspeed.verify.copies import Configs, Finding, RandomStates, StatesAtRest, compare_replicas, exchanged
from deepspeed.verify.formulas import formula_of
from deepspeed.verify.replay import record
from deepspeed.verify.sample import StepFacts
from deepspeed.verify.updates import SampledUpdates

if TYPE_CHECKING:
    from deepspeed.config.monitor import VerifyConfig
    from deepspeed.runtime.parts import Parts

_MOST_SHOWN = 8


class StepVerifier:
    """Follows one engine."""

    def __init__(self, parts: Parts, config: VerifyConfig, every: int) -> None:
        self._parts, self._every = parts, every
        self._action, self._folder = config.action, config.replay
        self._turn = 0
        self._configs, self._random = Configs(parts.config.loaded.raw), RandomStates()
        self._rest: StatesAtRest | None = None
        self._updates: SampledUpdates | None = None
        self._found: list[Finding] = []
        self._plain_norm: float | None = None
        self._coming: Subscription | None = None
        self._subscriptions: list[Subscription] = []
        self._samples = config.parameters if config.parameters and self._can_sample() else 0

    def attach(self, events: EventStream) -> StepVerifier:
        """Begin to follow; pretended ranks have nothing to compare."""
        self._events = events
        if is_fake_world():
            return self
        self._subscriptions = [
            events.subscribe(StepFinished, self._step_finished),
            events.subscribe(RunContinued, self._run_continued),
        ]
        self._prepare(1)
        return self

    def close(self) -> None:
        """Let go of hooks and events."""
        self._disarm()
        for each in self._subscriptions:
            each.close()

    def _run_continued(self, event: RunContinued) -> None:
        self._random = RandomStates()
        self._prepare(event.step + 1)

    def _can_sample(self) -> bool:
        """Whether updates can be computed again; a warning says why not."""
        parts, optimizer = self._parts, self._parts.basic_optimizer
        reason = None
        if optimizer is None or parts.states is None or parts.stepper is None:
            reason = "there is no optimizer"
        elif parts.stepper.in_backward is not None:
            reason = "optimizer_in_backward uses gradients up while backward runs"
        elif parts.states.deferral is not None:
            reason = "zero_optimization.zenflow updates a part of each parameter"
        elif not any(formula_of(optimizer, group) for group in optimizer.param_groups):
            reason = f"there is no plain formula of {type(optimizer).__name__}; gradients are compared"
        if reason is not None:
            log_dist(f"verify.parameters: updates are not computed again: {reason}", level=logging.WARNING)
        return reason is None or reason.endswith("compared")

    def _prepare(self, step: int) -> None:
        """A step with that number comes next."""
        self._disarm()
        if step % self._every:
            return
        self._rest = StatesAtRest(self._parts)
        if self._samples:
            self._updates = SampledUpdates(self._parts, self._samples, self._turn)
        self._turn += 1
        self._coming = self._events.subscribe(PhaseBegan, self._phase_began)

    def _disarm(self) -> None:
        if self._coming is not None:
            self._coming.close()
        if self._updates is not None:
            self._updates.close()
        self._coming = self._rest = self._updates = None
        self._found, self._plain_norm = [], None

    def _phase_began(self, event: PhaseBegan) -> None:
        if event.phase is not Phase.STEP or self._rest is None:
            return
        parts = self._parts
        self._found = [*self._configs.compare(parts.device), *self._random.compare(parts), *self._rest.compare()]
        self._rest = None  # what it keeps is written now
        if self._updates is not None:
            parts.reducer.finish()
        self._found += compare_replicas(parts)
        if self._updates is not None:
            self._updates.before(keep=self._folder is not None)
            self._plain_norm = self._second_norm()

    def _second_norm(self) -> float | None:
        states, stepper = self._parts.states, self._parts.stepper
        if states is None or states.away or stepper is None or not stepper.report_norm:
            return None
        return float(states.gradient_norm()) * self._parts.backward.unit

    def _step_finished(self, event: StepFinished) -> None:
        if self._coming is not None:
            self._finish(event)
        self._prepare(event.step + 1)

    def _finish(self, event: StepFinished) -> None:
        found, updates = list(self._found), self._updates
        norm = None if self._plain_norm is None or event.grad_norm is None else float(event.grad_norm)
        clipping = self._parts.config.schema.gradient_clipping
        if clipping and norm is None and event.grad_norm is not None:
            norm = float(event.grad_norm)
        facts = StepFacts(event.step, event.applied, norm, self._plain_norm, clipping)
        if updates is not None:
            norm_finding = facts.judge(comm.get_rank())
            found += [norm_finding] if norm_finding is not None else []
            published = updates.after()
            found += [finding for sample in updates.judged if (finding := sample.judge(facts)) is not None]
            found += published
        everything = exchanged(found, self._parts.device)
        if everything:
            self._act(facts, everything)

    def _act(self, facts: StepFacts, found: list[Finding]) -> None:
        action, folder = self._action, self._folder
        lines = [str(finding) for finding in found[:_MOST_SHOWN]]
        if len(found) > _MOST_SHOWN:
            lines.append(f"and {len(found) - _MOST_SHOWN} more")
        text = f"verify: step {facts.step} has a difference\n  " + "\n  ".join(lines)
        if folder is not None and action != "stop" and self._updates is not None:
            place = record(folder, comm.get_rank(), facts, self._updates.judged, self._updates.local, found)
            text += f"\n  the step is recorded in {place}: deepspeed.replay({str(place)!r}) repeats it"
        if action == "warn":
            if comm.get_rank() == 0:
                logger.warning("%s", text)
            return
        raise VerificationError(
            f"{text}\nThe run stops because verify.action is {action!r}. Memory, a link or a kernel may be faulty: run "
            "ds_preflight on these hosts, and resume from a checkpoint that was saved before the last clean check"
        )
