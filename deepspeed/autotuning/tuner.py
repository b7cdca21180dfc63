"""The order of experiments: as listed, at random, or by what the forecast and the runs so far let one expect."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from deepspeed.autotuning.forecast import Forecast
from deepspeed.autotuning.scheduler import Ending, Outcome
from deepspeed.autotuning.space import Candidate
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from deepspeed.config.memory import size_text

_BETTER = 1.01  # a gain below this is noise
_OPTIMISM = 0.9  # a forecast that a run has corrected is at most so wrong
_GUESS = 0.6  # one that none has
_GROWTH = 4  # without a forecast: how much larger than all before a micro batch may be
_OVERHEAD = 4  # without any knowledge: a micro step costs as much as so many samples, and its samples


class ExperimentOrder(ABC):
    """Asked for the next candidate, told how it went; never names one that cannot fit, as far as that is known."""

    def __init__(
        self,
        candidates: Iterable[Candidate],
        config: DeepSpeedAutotuningConfig,
        forecast: Forecast,
        first: Candidate,
    ) -> None:
        self._left = list(dict.fromkeys([first, *candidates]))
        self._config, self._forecast, self._first = config, forecast, first
        self.measured: dict[Candidate, float] = {}
        """Seconds of a step."""
        self._peaks: dict[Candidate, float] = {}
        self._died: list[Candidate] = []
        self._trials: Counter[int] = Counter()
        self._idle: Counter[object] = Counter()
        self._best: dict[object, float] = {}
        self.pruned: dict[Candidate, str] = {}
        """What was not run because it cannot fit, and why."""

    def next(self) -> Candidate | None:
        """The candidate to run now; None when the search is over."""
        if self._left and self._left[0] == self._first:
            return self._take(self._left[0])
        for candidate in list(self._left):
            if (reason := self._misfit(candidate)) is not None:
                self._left.remove(candidate)
                self.pruned[candidate] = reason
        tried = (each for each in self._ordered() if self._trials[each.stage] < self._config.tuner_num_trials)
        limit = self._config.tuner_early_stopping
        return next((self._take(each) for each in tried if self._idle[self._space(each)] < limit), None)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """How the run of a candidate ended."""
        self._trials[candidate.stage] += 1
        value = 0.0
        if outcome.ending is Ending.MEASURED:
            self.measured[candidate] = seconds = outcome.metrics["latency"] / 1e3
            self._peaks[candidate] = outcome.metrics["max_mem_per_gpu"]
            value = self.goodness(candidate, seconds)
        elif outcome.ending is Ending.MEMORY:
            self._died.append(candidate)
        space = self._space(candidate)
        better = value > self._best.get(space, 0.0) * _BETTER
        self._idle[space] = 0 if better else self._idle[space] + 1
        self._best[space] = max(value, self._best.get(space, 0.0))

    def goodness(self, candidate: Candidate, seconds: float) -> float:
        """What is largest for the best one: samples per second, or for `latency` steps per second."""
        return (1 if self._config.metric == "latency" else candidate.samples) / max(seconds, 1e-12)

    @abstractmethod
    def _ordered(self) -> Sequence[Candidate]:
        """What is left, in the order in which it is to be run."""

    def _space(self, candidate: Candidate) -> object:
        """Whose experiments count for early stopping."""
        return candidate.stage

    def _take(self, candidate: Candidate) -> Candidate:
        self._left.remove(candidate)
        return candidate

    def _misfit(self, candidate: Candidate) -> str | None:
        limit, refused = self._forecast.limit, self._forecast.refused or {}
        if candidate.stage in refused:
            return f"no engine: {refused[candidate.stage]}"
        for dead in self._died:
            if candidate.stage <= dead.stage and candidate.micro >= dead.micro:
                return f"{dead.name} ran out of memory"
        if limit is None:
            return None
        peak = self._forecast.peak(candidate)
        if peak is not None and peak > limit:
            return f"needs {size_text(round(peak))} of {size_text(limit)} by the forecast"
        seen = sorted((each.micro, peak) for each, peak in self._peaks.items() if each.stage == candidate.stage)
        if len(seen) > 1 and seen[-1][0] > seen[0][0] and candidate.micro > seen[-1][0]:
            (low, least), (high, most) = seen[0], seen[-1]
            peak = most + (most - least) / (high - low) * (candidate.micro - high)
            if peak > limit:
                return f"needs {size_text(round(peak))} of {size_text(limit)}, as smaller micro batches let expect"
        return None


class GridSearchTuner(ExperimentOrder):
    """As they are listed."""

    def _ordered(self) -> Sequence[Candidate]:
        return self._left


class RandomTuner(ExperimentOrder):
    """At random; the same order each time, so that a search that was cut off goes on."""

    def _ordered(self) -> Sequence[Candidate]:
        return sorted(self._left, key=lambda each: random.Random(each.name).random())


class ModelBasedTuner(ExperimentOrder):
    """The best expected one first.

    Seconds are those of the forecast, or of a line through the micro batches that were measured; the run that is most
    like a candidate says how far these are off.
    """

    def _space(self, candidate: Candidate) -> object:
        return None

    def _ordered(self) -> Sequence[Candidate]:
        best = self._best.get(None, 0.0)
        known = {(each.stage, each.extras) for each in self.measured}
        stages = {each.stage for each in self.measured}
        scored: list[tuple[float, bool, Candidate]] = []
        for each in self._left:
            good = self.goodness(each, self._expected(each))
            least = _OPTIMISM if (each.stage, each.extras) in known else _GUESS
            if self._allowed(each) and good >= least * best:
                scored.append((good, each.stage in stages, each))
        # of equally good ones the one at a stage that was not tried, then the one with the smaller micro batch
        scored.sort(key=lambda row: (-_rounded(row[0]), row[1], row[2].micro))
        return [candidate for _, _, candidate in scored]

    def _allowed(self, candidate: Candidate) -> bool:
        """Within the sizes of a stage, and not far beyond what was measured where nothing is forecast."""
        sizes = {each.micro for each in self.measured if each.stage == candidate.stage}
        forecast = self._forecast.stages is not None and candidate.stage in self._forecast.stages
        if not forecast and self.measured:
            if candidate.micro > _GROWTH * max(each.micro for each in self.measured):
                return False
            if candidate.stage == self._first.stage:  # where the best micro batch is looked for
                return True
        return candidate.micro in sizes or len(sizes) < self._config.num_tuning_micro_batch_sizes

    def _expected(self, candidate: Candidate) -> float:
        shape = self._shape(candidate)
        if not self.measured:
            return shape
        near = min(self.measured, key=lambda each: _distance(each, candidate))
        return shape * self.measured[near] / self._shape(near)

    def _shape(self, candidate: Candidate) -> float:
        """Seconds by the forecast or the line, up to a factor."""
        stages = self._forecast.stages or {}
        if candidate.stage in stages and (seconds := stages[candidate.stage].seconds(candidate)) > 0:
            return seconds
        fixed, each = self._line()
        return candidate.steps * (fixed + each * candidate.micro)

    def _line(self) -> tuple[float, float]:
        """Seconds of a micro step without samples, and of each sample."""
        groups: dict[tuple[int, object], dict[int, float]] = {}
        for candidate, seconds in self.measured.items():
            groups.setdefault((candidate.stage, candidate.extras), {})[candidate.micro] = seconds / candidate.steps
        none: dict[int, float] = {}
        points = max(groups.values(), key=len, default=none)
        if len(points) < 2:
            return _OVERHEAD, 1.0
        middle, mean = sum(points) / len(points), sum(points.values()) / len(points)
        slope = sum((micro - middle) * (seconds - mean) for micro, seconds in points.items())
        slope = max(slope / sum((micro - middle) ** 2 for micro in points), mean / middle * 1e-2)
        return max(mean - slope * middle, 0.0), slope


def _rounded(value: float) -> float:
    """Two digits: what differs by less is as good."""
    return 0.0 if value <= 0 else round(value, 1 - math.floor(math.log10(value)))


def _distance(one: Candidate, other: Candidate) -> float:
    """How unlike two candidates are; a stage counts as much as sixteen times the micro batch."""
    different = sum(first != second for first, second in zip(one.extras, other.extras, strict=True))
    return 4 * (one.stage != other.stage) + different + abs(math.log2(one.micro / other.micro))
