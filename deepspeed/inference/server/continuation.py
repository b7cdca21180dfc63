"""`Continuation`: one text of an answer, as its tokens come; what can be shown of it, and the scores of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.generate.params import SamplingParams
from deepspeed.generate.sequence import Token
from deepspeed.generate.stops import TextStream, end_ids
from deepspeed.inference.server.text import TextModel


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its log-probability, and those of the most probable ones."""

    text: str
    data: bytes
    logprob: float | None
    others: Sequence[tuple[str, bytes, float]]
    offset: int  # of its text in the whole

    @classmethod
    def make(
        cls, text: TextModel, token: int, logprob: float | None, top: Mapping[int, float] | None, offset: int
    ) -> TokenScore:
        """For a token of a model."""
        others = [(text.token_text(each), text.bytes_of(each), value) for each, value in (top or {}).items()]
        return cls(text.token_text(token), text.bytes_of(token), logprob, others, offset)

    def entry(self) -> dict[str, Any]:
        """As chat completions have it."""
        others = [{"token": name, "logprob": value, "bytes": list(data)} for name, data, value in self.others]
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.data), "top_logprobs": others}

    def top(self) -> dict[str, float] | None:
        """As completions have it; None for a first token, which follows nothing."""
        return None if self.logprob is None else {name: value for name, _, value in self.others}


class Continuation:
    """Collects the text of one choice; text that a stop string could still cut off is held back."""

    def __init__(
        self, text: TextModel, params: SamplingParams, eos: Iterable[int], *, echo: str = "", silent: bool = False
    ) -> None:
        """`eos`: the model's tokens for the end. `echo`: text before the answer. `silent`: show nothing else."""
        self.finish_reason: str | None = None
        self.tokens: list[int] = []  # since the last release
        self._text = text
        self._stream = TextStream(text.decode, params)
        self._visible = [echo] if echo else []
        self._length = len(echo)  # of what was released and what is visible
        self._scored = params.logprobs is not None
        self._scores: list[TokenScore] = []
        self._silent = silent
        self._ends = end_ids(params, eos)

    @property
    def ended(self) -> bool:
        """Whether it has all its tokens."""
        return self.finish_reason is not None

    def score_prompt(self, prompt: Sequence[int], scores: Sequence[Any]) -> None:
        """Scores of an echoed prompt; its first token follows nothing and has none."""
        known = {
            each.start + at: pair
            for each in scores
            for at, pair in enumerate(zip(each.logprobs, each.tops, strict=True))
        }
        shown, offset = TextStream(self._text.decode, SamplingParams()), 0
        for at, token in enumerate(prompt):
            logprob, top = known.get(at, (None, None))
            self._scores.append(TokenScore.make(self._text, token, logprob, top, min(offset, self._length)))
            offset += len(shown.push((token,)))

    def add(self, event: Token) -> bool:
        """The next token; whether it ended the text."""
        ended = event.finish_reason is not None
        if self._silent:
            self.finish_reason = event.finish_reason or "length"
            return True
        offset = self._length
        piece = ""
        # A token that ends the text is no part of it, nor is one that stands for none.
        if event.id >= 0 and not (event.finish_reason == "stop" and event.id in self._ends):
            piece = self._stream.push((event.id,))
            if self._scored:
                made = TokenScore.make(self._text, event.id, event.logprob, event.top_logprobs, offset)
                self._scores.append(made)
        if event.id >= 0:
            self.tokens.append(event.id)
        stopped = self._stream.stopped is not None
        if ended and not stopped:
            piece += self._stream.flush()
        if piece:
            self._visible.append(piece)
            self._length += len(piece)
        if stopped:
            self._scores = [score for score in self._scores if score.offset < self._length]
        self.finish_reason = "stop" if stopped else event.finish_reason
        return self.ended

    def release(self) -> tuple[str, list[TokenScore], list[int]]:
        """What became visible since the last call: text, scores and tokens."""
        piece = "".join(self._visible)
        self._visible.clear()
        scores, tokens = self._scores, self.tokens
        self._scores, self.tokens = [], []
        return piece, scores, tokens
