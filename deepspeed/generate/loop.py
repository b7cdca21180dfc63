"""The loop of generation: schedule, run, one step later take the tokens, so that the host plans while a step runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.generate.drafts import Drafter
from deepspeed.generate.guide import SchemaGuide
from deepspeed.generate.runner import Runner
from deepspeed.generate.sampler import Sampler, greedy, plainly_greedy
from deepspeed.generate.scheduler import ScheduledStep, ScheduledWork, Scheduler
from deepspeed.generate.sequence import PromptScores, SequenceState, SequenceUpdate, TopLogprobs
from deepspeed.generate.sequence import Sequence as Generated
from deepspeed.ops.generate.sampling import SampleResult


@dataclass(slots=True)
class _InFlight:
    step: ScheduledStep
    rows: list[tuple[ScheduledWork, int]]
    """Of each row of the results: its work, and how many of the work's rows came before."""
    results: list[Tensor]
    """Tokens, log-probabilities, top values and ids; in host memory once `event` has passed."""
    event: Any


class GenerationLoop:
    """Runs the sequences of a scheduler; `asynchronous`: one step is planned while another runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        *,
        asynchronous: bool,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler, self._runner, self._sampler = scheduler, runner, sampler
        self._depth = 1 if asynchronous else 0
        self._drafter = drafter
        self._in_flight: deque[_InFlight] = deque()
        self._places: dict[int, int] = {}
        self._free = list(range(runner.pending.shape[0] - 1, -1, -1))
        self._running: dict[int, Generated] = {}
        self._special: set[int] = set()
        """Sequences that need more than the largest logit."""
        self.seeds: dict[int, int] = {}
        """By uid."""
        self.guides: dict[int, SchemaGuide] = {}
        self.prompt_scores: dict[int, list[PromptScores]] = {}
        self.steps, self.step_seconds, self.host_seconds = 0, 0.0, 0.0
        self._last, self._waited = time.perf_counter(), 0.0

    def add(self, request: Sequence[Generated], seeds: Sequence[int]) -> None:
        """Queue the sequences of one request."""
        self.scheduler.add(request)
        self._running.update((each.uid, each) for each in request)
        self._special.update(each.uid for each in request if not plainly_greedy(each))
        self.seeds.update((each.uid, seed) for each, seed in zip(request, seeds, strict=True))

    def finish(self, uid: int, reason: str) -> bool:
        """End a sequence now; False if it has ended already."""
        ended = self.scheduler.finish(uid, reason)
        if ended:
            self._forget(uid)
        return ended

    @property
    def busy(self) -> bool:
        """Whether a sequence has not ended, or a step is in flight."""
        return bool(self._running or self._in_flight)

    def step(self) -> list[SequenceUpdate]:
        """Start the next step and take the tokens of the one before."""
        now = time.perf_counter()
        self.step_seconds, self._last = now - self._last, now
        self._waited = 0.0
        # drafts and schemas are made of known tokens
        updates = self.drain() if self.guides or self._drafter is not None else []
        plan = self.scheduler.next(self._drafts())
        if plan is not None:
            self._launch(plan)
        updates += self.drain(self._depth if plan is not None else 0)
        self.host_seconds = time.perf_counter() - now - self._waited
        return updates

    def drain(self, left: int = 0) -> list[SequenceUpdate]:
        """Take the tokens of all steps in flight but so many."""
        updates: list[SequenceUpdate] = []
        while len(self._in_flight) > left:
            updates += self._collect()
        return updates

    def reset(self) -> None:
        """Compute what runs again, for other weights or other memory; no step may be in flight."""
        self.scheduler.reset()
        if self._drafter is not None:
            for uid in self._running:
                self._drafter.forget(uid)

    def _drafts(self) -> Mapping[int, Sequence[int]]:
        if self._drafter is None:
            return {}
        ready = [each for each in self.scheduler.decoding if each.uid not in self.guides and _may_guess(each)]
        found = self._drafter.propose(ready, self.seeds)
        return {uid: guesses for uid, guesses in found.items() if guesses}

    def _launch(self, plan: ScheduledStep) -> None:
        if plan.to_host:
            self._runner.cache.to_host(plan.to_host)
        if plan.from_host:
            self._runner.cache.from_host(plan.from_host)
        self.steps += 1
        held = self._places
        places = [held[uid] if (uid := each.sequence.uid) in held else self._place(each.sequence) for each in plan.work]
        wanted, rows, targets, scored = _wanted(plan.work, places)
        logits, batch = self._runner.run(plan.work, places, wanted or [0], targets)
        for sequence, start, first, count in scored:
            self._score(sequence, start, logits[first : first + count])
        results: list[Tensor] = []
        event = None
        if rows:
            result = self._draw(logits, rows)
            self._runner.pending.index_copy_(0, batch.targets[: len(rows)], result.tokens)
            results, event = _to_host(result)
        self._in_flight.append(_InFlight(plan, rows, results, event))

    def _draw(self, logits: Tensor, rows: Sequence[tuple[ScheduledWork, int]]) -> SampleResult:
        if not self._special:
            return greedy(logits[: len(rows)])
        drawn = [(work.sequence, self.seeds.get(work.sequence.uid, 0), _position(work, at)) for work, at in rows]
        guided = {work.sequence.uid for work, _ in rows} & self.guides.keys() if self.guides else ()
        return self._sampler.draw(logits, drawn, {uid: self.guides[uid].mask() for uid in guided})

    def _place(self, sequence: Generated) -> int:
        place = self._places.get(sequence.uid)
        if place is None:
            if not self._free:
                for uid in [uid for uid, each in self._running.items() if each.state is not SequenceState.RUNNING]:
                    self._give_place_back(uid)
            place = self._places[sequence.uid] = self._free.pop()
        return place

    def _give_place_back(self, uid: int) -> None:
        place = self._places.pop(uid, None)
        if place is not None:
            self._free.append(place)

    def _score(self, sequence: Generated, start: int, logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow."""
        most = sequence.params.prompt_logprobs or 0
        table = logits.float().log_softmax(-1)
        following = torch.tensor(sequence.tokens[start + 1 : start + 1 + len(logits)], device=logits.device)
        own = table.gather(1, following[:, None])[:, 0].tolist()
        values, ids = table.topk(most) if most else (table[:, :0], table[:, :0].long())
        tops = [dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        self.prompt_scores.setdefault(sequence.uid, []).append(PromptScores(start + 1, own, tops))

    def _collect(self) -> list[SequenceUpdate]:
        done = self._in_flight.popleft()
        if done.event is not None:
            begin = time.perf_counter()
            done.event.synchronize()
            self._waited += time.perf_counter() - begin
        sampled: dict[int, list[int]] = {}
        scores: dict[int, tuple[list[float], list[TopLogprobs]]] = {}
        failed: list[Generated] = []
        if not done.rows:
            return self._advance(done.step, sampled, scores, failed)
        tokens, logprobs = done.results[0].tolist(), done.results[1].tolist()
        if not self._special and self._drafter is None and not isnan(sum(logprobs)):
            sampled = {work.sequence.uid: [token] for (work, _), token in zip(done.rows, tokens, strict=True)}
        else:
            values, ids = (each.tolist() for each in done.results[2:])
            for at, (work, number) in enumerate(done.rows):
                uid = work.sequence.uid
                found = sampled.setdefault(uid, [])
                if len(found) != number or (number and found[-1] != work.drafts[number - 1]):
                    continue  # it follows a guess that was wrong
                found.append(tokens[at])
                if isnan(logprobs[at]):
                    failed.append(work.sequence)
                if work.sequence.params.logprobs is not None:
                    own, tops = scores.setdefault(uid, ([], []))
                    own.append(logprobs[at])
                    count = work.sequence.params.logprobs
                    tops.append(dict(zip(ids[at][:count], values[at][:count], strict=True)))
        return self._advance(done.step, sampled, scores, failed)

    def _advance(
        self,
        step: ScheduledStep,
        sampled: Mapping[int, list[int]],
        scores: Mapping[int, tuple[list[float], list[TopLogprobs]]],
        failed: Sequence[Generated],
    ) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        for sequence in failed:
            if self.scheduler.finish(sequence.uid, "error"):
                updates.append(SequenceUpdate(sequence, []))
        for update in self.scheduler.collect(step, sampled):
            sequence, tokens = update.sequence, update.tokens
            if scores and sequence.uid in scores:
                own, tops = scores[sequence.uid]
                update = SequenceUpdate(sequence, tokens, own[: len(tokens)], tops[: len(tokens)])
            updates.append(update)
            if self.guides and sequence.uid in self.guides and not sequence.finished:
                guide = self.guides[sequence.uid]
                guide.take(tokens)
                if guide.complete:  # also for models without a token for the end
                    self.scheduler.finish(sequence.uid, "stop")
        for update in updates:
            if update.sequence.state is SequenceState.FINISHED:
                self._forget(update.sequence.uid)
        return updates

    def _forget(self, uid: int) -> None:
        self._running.pop(uid, None)
        self._special.discard(uid)
        self._give_place_back(uid)
        self._sampler.forget(uid)
        self.seeds.pop(uid, None)
        self.guides.pop(uid, None)
        if self._drafter is not None:
            self._drafter.forget(uid)


def _wanted(
    work: Sequence[ScheduledWork], places: Sequence[int]
) -> tuple[list[int], list[tuple[ScheduledWork, int]], list[int], list[tuple[Generated, int, int, int]]]:
    """Tokens whose logits are needed: those that give a token, with their places, then those of scored prompts."""
    if all(each.count == 1 and each.samples for each in work):
        return list(range(len(work))), [(each, 0) for each in work], list(places), []
    wanted: list[int] = []
    rows: list[tuple[ScheduledWork, int]] = []
    targets: list[int] = []
    end = 0
    for each, place in zip(work, places, strict=True):
        end += each.count
        if each.samples:
            more = len(each.drafts)
            wanted += range(end - more - 1, end)
            rows += [(each, at) for at in range(more + 1)]
            targets += [place] * (more + 1)
    scored: list[tuple[Generated, int, int, int]] = []
    begin = 0
    for each in work:
        count = min(each.start + each.count, each.sequence.prompt_length - 1) - each.start
        if each.sequence.params.prompt_logprobs is not None and each.sequence.parent is None and count > 0:
            scored.append((each.sequence, each.start, len(wanted), count))
            wanted += range(begin, begin + count)
        begin += each.count
    return wanted, rows, targets, scored


def _position(work: ScheduledWork, at: int) -> int:
    """Of the token that a row gives."""
    return work.start + work.count - len(work.drafts) + at


def _may_guess(sequence: Generated) -> bool:
    """Penalties and a fewest number of tokens would change with each guess."""
    params = sequence.params
    return not params.penalised and not params.min_tokens and len(sequence.tokens) > sequence.prompt_length


def _to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Copies in host memory, complete once the event has passed."""
    if tensors[0].device.type == "cpu":
        return list(tensors), None
    found = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for target, source in zip(found, tensors, strict=True):
        target.copy_(source, non_blocking=True)
    event = get_accelerator().Event()
    event.record()
    return found, event
