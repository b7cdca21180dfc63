"""`Sequence`: the tokens of one continuation, and the blocks that hold them; `Token`: one that became known."""

from __future__ import annotations

import collections.abc
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
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


class SequenceUpdate(NamedTuple):
    """What became known of a sequence; a tuple, because one is made for every token."""

    sequence: Sequence
    tokens: collections.abc.Sequence[int]
    logprobs: collections.abc.Sequence[float] = ()
    """Of the tokens, where they were asked for."""
    tops: collections.abc.Sequence[TopLogprobs] = ()


class SequenceState(Enum):
    """Where a sequence is; its transitions belong to the scheduler."""

    WAITING = "waiting"  # has not run yet
    RUNNING = "running"  # holds blocks
    SWAPPED = "swapped"  # preempted: holds no block; what the cache or the host still has is found again
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of a prompt; `n` > 1 makes n of them, which share `request` and the blocks of the prompt.

    There are no phases: tokens are known, and the keys and values of the first `computed` are in the cache or will be
    when the steps handed out so far have run. `pending` tokens were sampled by such a step, but their ids are not
    known here yet.
    """

    uid: int
    tokens: list[int]  # known: the prompt, then what was generated
    params: SamplingParams
    _: KW_ONLY
    request: int = -1  # the uid of another one than the first
    index: int = 0
    priority: int = 0  # higher runs first
    end_ids: frozenset[int] = frozenset()  # tokens that end it (`stops.end_ids`)
    prompt_length: int = field(init=False)
    state: SequenceState = SequenceState.WAITING
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    cached_tokens: int = 0  # of the prompt, supplied by a prefix hit
    computed: int = 0
    pending: int = 0
    # of the scheduler
    rank: tuple[int, int, int] = (0, 0, 0)  # the lower runs first
    limit: int = 0  # length at which it ends
    parent: Sequence | None = None  # the sequence of the request that computes the prompt
    # of the cache
    blocks: list[list[int]] = field(default_factory=list)  # by cache group; -1: fell out of the window
    freed: list[int] = field(default_factory=list)  # by cache group: how many at the start are -1
    reach: int = 0  # positions below it have a block in every group
    root: bytes = b""  # hash before the first block
    hashes: list[bytes] = field(default_factory=list)  # of each full block of known tokens
    registered: int = 0  # full blocks that other sequences can find
    long: bool = False  # beyond the model's short context, where its keys are rotated by other frequencies

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.prompt_length = len(self.tokens)
        if self.request < 0:
            self.request = self.uid

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
