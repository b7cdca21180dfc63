"""The schedule of generation: which tokens of which sequences the next step computes, and in which blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.generate import sequence as sequences


class RequestTooLarge(UsageError):
    """A request that would not fit in an empty cache, or whose prompt fills the context."""


class QueueFull(DeepSpeedError, RuntimeError):
    """As many requests wait as may; try again later."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables: `blocks` of them on the device; `window`: how many tokens back a query reads."""

    layers: tuple[int, ...]
    blocks: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the schedule."""

    max_tokens_per_step: int = 768
    max_sequences: int = 512
    max_context: int = 8192
    block_size: int = 32
    max_queue: int | None = None  # requests that wait for their first step
    prefix_cache: bool = True
    salt: bytes = b""  # what makes equal tokens unequal prefixes: model, adapter


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class ScheduledWork:
    """Compute `count` tokens of a sequence from position `start`.

    Ids at positions the sequence does not know are, in order: the pending one, which is still on the device (then
    count is 1), or `drafts`. `samples`: the last token gives the next one (with drafts, every position from the last
    known token on gives one).
    """

    sequence: sequences.Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step does, in this order: `to_host`, `from_host`, `copies`, then the forward of `work`, decode first.

    Steps run in the order in which they were handed out. Block tables (`sequence.blocks`) are those at the return of
    `next`; pack them before it is called again.
    """

    work: tuple[ScheduledWork, ...]
    copies: tuple[tuple[int, int, int], ...]  # (group, source block, destination block)
    to_host: tuple[tuple[int, int, int], ...]  # (group, device block, host block)
    from_host: tuple[tuple[int, int, int], ...]  # (group, host block, device block)


class Progress(NamedTuple):
    """Tokens of a sequence that became known; `sequence.finish_reason` says whether it ended."""

    sequence: sequences.Sequence
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of now and sums since the start; blocks are summed over the cache groups."""

    waiting: int
    running: int
    swapped: int
    total_blocks: int
    free_blocks: int  # can be taken at once, cached ones included
    cached_blocks: int  # held by no sequence, but found by prefix
    host_blocks: int
    host_used_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    drafted: int
    accepted: int


class Scheduler:
    """Hands out steps and takes their tokens; asynchronous: `next` may be called before the last step's `collect`."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[CacheGroup], host_blocks: int = 0) -> None:
        """`host_blocks`: of each group, for blocks that leave the device."""
        raise RuntimeError("not yet")

    def add(self, request: Sequence[sequences.Sequence]) -> None:
        """Queue the sequences of one request, which share a prompt; RequestTooLarge or QueueFull if it cannot be."""

    def cancel(self, uid: int) -> bool:
        """End a sequence with the reason "cancelled"; False if it has ended already."""
        return self.finish(uid, "cancelled")

    def finish(self, uid: int, reason: str) -> bool:
        """End a sequence at any moment; False if it has ended already. "error" also forgets its cached blocks."""
        return False

    def next(self, drafts: Mapping[int, Sequence[int]] | None = None) -> ScheduledStep | None:
        """The next step; None: nothing can run until more is collected or added. `drafts`: guesses by uid."""
        return None

    def collect(self, step: ScheduledStep, sampled: Mapping[int, Sequence[int]]) -> list[Progress]:
        """Take a step's tokens by uid: one, or the accepted drafts and one; those of ended sequences are dropped."""
        return []

    def reset(self) -> None:
        """Forget the contents of the cache, for new weights or new memory: what runs is computed again."""

    @property
    def stats(self) -> SchedulerStats:
        """Counts for monitors."""
        raise RuntimeError("not yet")
