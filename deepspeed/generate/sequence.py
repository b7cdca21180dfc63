"""`Sequence`: the tokens of one continuation, and the blocks that hold them; `Token`: one that became known."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepspeed.generate.params import SamplingParams

TopLogprobs = dict[int, float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens from a position on."""

    start: int
    logprobs: list[float]
    tops: list[TopLogprobs]


class Token(NamedTuple):
    """A token of a request, as it became known."""

    uid: int
    index: int  # type: ignore[assignment]
    """Which of the request's `n` continuations."""
    id: int
    """-1 where a continuation ended without a token."""
    text: str
    """What can be shown now; it may hold text of earlier tokens back, or bring it."""
    logprob: float | None
    top_logprobs: Mapping[int, float] | None
    finish_reason: str | None
    """"stop", "length", "cancelled" or "error" with the last token."""
    cached_tokens: int
    prompt_tokens: int
    prompt_scores: collections.abc.Sequence[PromptScores] = ()
    """Of the whole prompt, with the first token of a request that asks for `prompt_logprobs`."""


class SequenceState(Enum):
    """Where a sequence is; its transitions belong to the scheduler."""

    WAITING = "waiting"  # has not run yet
    RUNNING = "running"  # holds blocks
    SWAPPED = "swapped"  # preempted: holds no block; what the cache or the host still has is found again
    FINISHED = "finished"


class Sequence:
    """One continuation of a prompt; `n` > 1 makes n of them, which share `request` and the blocks of the prompt.

    There are no phases: tokens are known, and the keys and values of the first `computed` are in the cache or will be
    when the steps handed out so far have run. `pending` tokens were sampled by such a step, but their ids are not
    known here yet.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "end_ids",
        "finish_reason",
        "freed",
        "hashes",
        "index",
        "limit",
        "params",
        "parent",
        "pending",
        "priority",
        "prompt_length",
        "rank",
        "reach",
        "registered",
        "request",
        "root",
        "state",
        "tokens",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        request: int | None = None,
        index: int = 0,
        priority: int = 0,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`priority`: higher runs first. `end_ids`: tokens that end it (`stops.end_ids`)."""
        self.uid = uid
        self.request = uid if request is None else request
        self.index = index
        self.priority = priority
        self.params = params
        self.end_ids = end_ids
        self.tokens = list(prompt)  # known: the prompt, then what was generated
        self.prompt_length = len(self.tokens)
        self.state = SequenceState.WAITING
        self.finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
        self.cached_tokens = 0  # of the prompt, supplied by a prefix hit
        self.computed = 0
        self.pending = 0
        # of the scheduler
        self.arrival = 0
        self.rank: tuple[int, int, int] = (-priority, 0, index)  # the lower runs first
        self.limit = 0  # length at which it ends
        self.parent: Sequence | None = None  # the sequence of the request that computes the prompt
        # of the cache
        self.blocks: list[list[int]] = []  # by cache group; -1: fell out of the window
        self.freed: list[int] = []  # by cache group: how many at the start are -1
        self.reach = 0  # positions below it have a block in every group
        self.root = b""  # hash before the first block
        self.hashes: list[bytes] = []  # of each full block of known tokens
        self.registered = 0  # full blocks that other sequences can find

    @property
    def generated(self) -> list[int]:
        """The known tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether it ended, for which `finish_reason` gives the reason."""
        return self.state is SequenceState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.uid}, {self.state.value}, {self.prompt_length} + {len(self.tokens) - self.prompt_length} "
            f"tokens, {self.computed} computed, {self.pending} pending)"
        )
