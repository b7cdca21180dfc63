"""What `/metrics` says: counters and histograms of the HTTP process, and the engines' own statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from time import monotonic
from typing import Any

_PREFIX = "deepspeed_"
_RECENT = 64  # answers whose rate says when a queue has room again
_LONGEST_RETRY = 60  # seconds

# key of an engine's statistics → name, kind, help
_OF_ENGINES: dict[str, tuple[str, str, str]] = {
    "waiting": ("engine_waiting", "gauge", "Sequences that wait in the engine's queue."),
    "running": ("engine_running", "gauge", "Sequences that the engine generates."),
    "total_blocks": ("cache_blocks", "gauge", "Blocks of the cache."),
    "free_blocks": ("cache_blocks_free", "gauge", "Blocks of the cache that no sequence holds."),
    "cached_blocks": ("cache_blocks_prefix", "gauge", "Free blocks that hold a prefix."),
    "prefix_hit_tokens": ("prefix_hit_tokens_total", "counter", "Prompt tokens whose keys and values were cached."),
    "prompt_tokens": ("prompt_tokens_total", "counter", "Prompt tokens of all requests."),
    "output_tokens": ("generated_tokens_total", "counter", "Tokens that were generated."),
    "preemptions": ("preemptions_total", "counter", "Sequences that gave their blocks to older ones."),
    "steps": ("steps_total", "counter", "Steps of the engine."),
    "drafted": ("draft_tokens_total", "counter", "Tokens that were guessed."),
    "accepted": ("draft_tokens_accepted_total", "counter", "Guessed tokens that were right."),
    "step_seconds": ("step_seconds", "gauge", "Duration of the last step."),
}


class Histogram:
    """How often a duration was at most so long."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """One more duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """As Prometheus reads it."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Measurements of the HTTP process."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()  # by path and status
        self.first_token = Histogram((0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))
        self.between_tokens = Histogram((0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.25, 1, 5))
        self.whole_answer = Histogram((0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300))
        self.open = 0
        self._ended: deque[float] = deque(maxlen=_RECENT)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """An answer to a completion ended."""
        self.answers[path, status] += 1
        if status == 200:
            self.whole_answer.add(seconds)
            self._ended.append(monotonic())

    def retry_after(self, waiting: int) -> int:
        """In how many seconds a queue of so many requests has room, by the rate of the last answers."""
        if len(self._ended) < 2:
            return 1
        rate = (len(self._ended) - 1) / max(monotonic() - self._ended[0], 1e-3)
        return min(_LONGEST_RETRY, max(1, ceil(waiting / 2 / rate)))

    def text(self, engines: Mapping[int, Mapping[str, Any]], waiting: int) -> str:
        """Everything in Prometheus' text format; `engines`: statistics by replica."""
        lines = [
            *_head("requests_open", "gauge", "Requests that are being answered."),
            f"{_PREFIX}requests_open {self.open}",
            *_head("requests_waiting", "gauge", "Requests without a first token."),
            f"{_PREFIX}requests_waiting {waiting}",
            *_head("requests_total", "counter", "Requests by path and status of the answer."),
        ]
        for (path, status), count in sorted(self.answers.items()):
            lines.append(f'{_PREFIX}requests_total{{path="{path}",status="{status}"}} {count}')
        for name, histogram, words in (
            ("time_to_first_token_seconds", self.first_token, "From a request to its first token."),
            ("time_between_tokens_seconds", self.between_tokens, "From one token of a text to the next."),
            ("request_seconds", self.whole_answer, "From a request to the end of its answer."),
        ):
            lines += [*_head(name, "histogram", words), *histogram.lines(_PREFIX + name)]
        for key, (name, kind, words) in _OF_ENGINES.items():
            found = {number: stats[key] for number, stats in engines.items() if key in stats}
            if found:
                lines += _head(name, kind, words)
                lines += [f'{_PREFIX}{name}{{replica="{number}"}} {value}' for number, value in found.items()]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}{name} {words}", f"# TYPE {_PREFIX}{name} {kind}"
