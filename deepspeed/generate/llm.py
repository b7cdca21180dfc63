"""`LLM`: a causal model that generates for many requests at once, over a paged cache."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Real
from operator import index
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from deepspeed.config.inference import RaggedInferenceEngineConfig, read_inference_config
from deepspeed.errors import UsageError, printable
from deepspeed.generate import weights
from deepspeed.generate.build import EngineParts, build
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.runner import Runner
from deepspeed.generate.sampler import seed_of
from deepspeed.generate.sequence import PromptScores, SequenceUpdate, Token, TopLogprobs
from deepspeed.generate.sequence import Sequence as Generated
from deepspeed.generate.stops import TextStream, end_ids
from deepspeed.memory.host import ParkedStorages

Prompt = str | Sequence[int] | Tensor
_NONE = (-1,)
"""In place of a token, where a continuation ended without one."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation of a prompt."""

    uid: int
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None
    top_logprobs: list[Mapping[int, float]] | None
    prompt_logprobs: list[float | None] | None
    """None for the first token, which follows nothing."""
    cached_tokens: int


@dataclass(slots=True)
class _Continuation:
    sequence: Generated
    stream: TextStream | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reason: str | None = None


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: SamplingParams
    parts: list[_Continuation]
    scores: Sequence[PromptScores] = ()

    @property
    def ended(self) -> bool:
        return all(part.reason is not None for part in self.parts)


class LLM:
    """Generates with a model of Transformers, a path or a module. With `tp_size` above 1, every rank makes the same
    calls."""

    @torch.inference_mode(False)  # what it keeps is written to later, in whatever mode that is
    def __init__(
        self,
        model: Any,
        config: RaggedInferenceEngineConfig | Mapping[str, Any] | str | None = None,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | str = "auto",
        **keys: Any,
    ) -> None:
        """`tokenizer`: an object, a path, or None for the one in the model's folder; `keys` are keys of the config."""
        self.config = read_inference_config(RaggedInferenceEngineConfig, config, keys)
        self._stack = ExitStack()
        with self._stack:
            self._parts = build(model, self.config, dtype, self._stack)
            self._stack = self._stack.pop_all()
        self.tokenizer = _tokenizer(tokenizer, self._parts.folder)
        self._uids, self._sequence_uids = itertools.count(), itertools.count()
        self._random = random.Random(self._parts.base_seed)
        self._requests: dict[int, _Request] = {}
        self._readers: dict[int, deque[Token]] = {}
        """Where the tokens of a request go while `generate` or `stream` reads them."""
        self._unread: deque[Token] = deque()
        """Tokens of the other requests, for `step`."""
        self._sleeping: ParkedStorages | None = None
        self._prompt_tokens = self._output_tokens = 0

    @property
    def model(self) -> nn.Module:
        """The model, as this rank holds it."""
        return self._open.model

    @property
    def _open(self) -> EngineParts:
        if self._parts is None:
            raise UsageError("this LLM is closed. Make a new one")
        return self._parts

    # requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue all prompts; completions come in the order of the prompts, those of one prompt by index."""
        listed = _listed(prompts)
        several = isinstance(params, Iterable) and not isinstance(params, (str, Mapping))
        each = list(params) if several else [_params(params)] * len(listed)  # type: ignore[arg-type]
        if len(each) != len(listed):
            raise UsageError(f"{len(each)} SamplingParams were given for {len(listed)} prompts; give one, or one each")
        checked = [(self._tokens_of(prompt), _params(one)) for prompt, one in zip(listed, each, strict=True)]
        for ids, one in checked:
            self._check(ids, one)
        uids: list[int] = []
        done: dict[int, list[Completion]] = {}
        known: deque[Token] = deque()
        with _progress(len(checked), shown=progress) as advance:
            try:
                for ids, one in checked:
                    uids.append(self.submit(ids, one))
                    self._readers[uids[-1]] = known
                while len(done) < len(uids):
                    self._advance()
                    finished = {token.uid for token in known if token.finish_reason is not None}
                    known.clear()
                    for uid in finished:
                        if self._requests[uid].ended:
                            done[uid] = self._completions(uid)
                            advance()
            finally:
                for uid in uids:
                    self.cancel(uid)
                    self._readers.pop(uid, None)
        return [completion for uid in uids for completion in done[uid]]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Token]:
        """The tokens of one prompt as they become known; closing the iterator cancels the rest."""
        uid = self.submit(prompt, params)
        known = self._readers[uid] = deque()
        try:
            while known or (self._open and (request := self._requests.get(uid)) is not None and not request.ended):
                if not known:
                    self._advance()
                while known:
                    yield known.popleft()
        finally:
            self.cancel(uid)
            del self._readers[uid]

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> int:
        """Queue a prompt; returns its uid, by which `step` names its tokens. Higher priorities run first."""
        parts = self._open
        params = _params(params)
        if not isinstance(priority, int):
            raise UsageError(f"priority is {priority!r}; it must be a whole number, of which higher ones run first")
        ids = self._tokens_of(prompt)
        self._check(ids, params)
        uid = next(self._uids)
        ends = end_ids(params, parts.eos_ids)
        sequences = [
            Generated(next(self._sequence_uids), ids, params, request=uid, index=index, priority=priority, end_ids=ends)
            for index in range(params.n)
        ]
        base = self._random.getrandbits(63) if params.seed is None else params.seed
        guides = {}
        if params.schema is not None:  # which may be refused, as may the sequences
            tokenizer = self._tokenizer_for("schema")
            guides = {sequence.uid: parts.guides.make(params.schema, tokenizer) for sequence in sequences}
        request = _Request(ids, params, [_Continuation(each, self._text(params)) for each in sequences])
        parts.loop.add(sequences, [seed_of(base, index) for index in range(params.n)])
        parts.loop.guides.update(guides)
        self._requests[uid] = request
        self._prompt_tokens += len(ids)
        return uid

    def step(self) -> list[Token]:
        """Run one step; returns the tokens that became known, which may be none."""
        self._advance()
        tokens, self._unread = list(self._unread), deque()
        for uid in {token.uid for token in tokens}:
            if uid in self._requests and self._requests[uid].ended:
                del self._requests[uid]
        return tokens

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._unread) or self._open.loop.busy

    def cancel(self, uid: int) -> None:
        """End a request and free its blocks; nothing happens if it has ended."""
        request = self._requests.pop(uid, None)
        for part in request.parts if request is not None else ():
            self._open.loop.prompt_scores.pop(part.sequence.uid, None)
            if part.reason is None:
                self._open.loop.finish(part.sequence.uid, "cancelled")

    @torch.inference_mode(False)
    def _advance(self) -> None:
        """Run a step."""
        if self._sleeping is not None:
            raise UsageError("this LLM sleeps. Call wake() before it generates")
        self._hand_out(self._open.loop.step())

    def _hand_out(self, updates: Iterable[SequenceUpdate]) -> None:
        """Give new tokens to `generate` or `stream` where one of them reads the request, else to `step`."""
        for update in updates:
            self._readers.get(update.sequence.request, self._unread).extend(self._tokens(update))

    def _tokens(self, update: SequenceUpdate) -> Iterator[Token]:
        sequence = update.sequence
        request = self._requests.get(sequence.request)
        if request is None or (part := request.parts[sequence.index]).reason is not None:
            return
        ended = sequence.finished
        tokens = update.tokens or (_NONE if ended else ())
        last, asked = len(tokens) - 1, request.params.logprobs is not None
        scores = self._open.loop.prompt_scores.pop(sequence.uid, ()) if tokens else ()
        if request.scores:  # a sequence that was preempted computes them again
            scores = ()
        request.scores = request.scores or scores
        for at, token in enumerate(tokens):
            reason = sequence.finish_reason if ended and at == last else None
            text, own, tops = "", None, None
            if part.stream is not None:
                text = part.stream.push([token]) if token >= 0 else ""
                if reason is not None:
                    text += part.stream.flush()
                if part.stream.stopped is not None:
                    reason = "stop"
                part.text.append(text)
            if token >= 0:
                self._output_tokens += 1
                part.ids.append(token)
                if asked:
                    own, tops = update.logprobs[at], update.tops[at]
                    part.logprobs.append(own)
                    part.tops.append(tops)
            part.reason = reason
            if reason is not None and not ended:
                self._open.loop.finish(sequence.uid, "stop")
            facts = sequence.cached_tokens, len(request.prompt), () if at else scores
            yield Token(sequence.request, sequence.index, token, text, own, tops, reason, *facts)
            if reason is not None:
                return

    def _completions(self, uid: int) -> list[Completion]:
        request = self._requests.pop(uid)
        scores: list[float | None] | None = None
        if request.params.prompt_logprobs is not None:
            scores = [None] * len(request.prompt)
            for scored in request.scores:
                scores[scored.start : scored.start + len(scored.logprobs)] = scored.logprobs
        asked = request.params.logprobs is not None
        return [
            Completion(
                uid,
                index,
                request.prompt,
                part.ids,
                "".join(part.text),
                part.reason or "error",
                part.logprobs if asked else None,
                list(part.tops) if asked else None,
                scores,
                part.sequence.cached_tokens,
            )
            for index, part in enumerate(request.parts)
        ]

    # text and checks

    def _tokenizer_for(self, what: str) -> Any:
        if self.tokenizer is None:
            raise UsageError(f"{what} needs a tokenizer, and this LLM has none. Pass tokenizer=…, or give token ids")
        return self.tokenizer

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer_for("a prompt of text")(prompt)["input_ids"])
        listed = _items(prompt)
        try:
            return [index(token) for token in listed]
        except TypeError as error:
            raise UsageError(
                f"a prompt is text or a list of token ids; found {printable(repr(prompt), 100)}"
            ) from error

    def _text(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            if params.stop_strings:
                self._tokenizer_for("stop")
            return None
        return TextStream(partial(self.tokenizer.decode, skip_special_tokens=True), params)

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        vocabulary, context = self._open.vocabulary, self._open.context
        if not ids:
            raise UsageError("the prompt is empty; it needs one token at least")
        foreign = next((token for token in ids if not 0 <= token < vocabulary), None)
        if foreign is not None:
            raise UsageError(
                f"the prompt has the token id {foreign}, but the model's vocabulary ends at {vocabulary - 1}"
            )
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
            if outside is not None:
                raise UsageError(
                    f"{name} has the token id {outside}, but the model's vocabulary ends at {vocabulary - 1}"
                )
        if len(ids) >= context:
            own = context < self.config.state_manager.max_context
            raise UsageError(
                f"the prompt has {len(ids)} tokens, but a sequence has at most {context} with what follows. Shorten "
                + ("it: the model has no more positions." if own else "it, or raise state_manager.max_context.")
            )

    # the engine

    def update_weights(self, items: weights.WeightItems) -> int:
        """Take other values, whole tensors by Transformers' names; returns how many parameters were replaced.

        What runs goes on with the new values; what is cached is computed again.
        """
        parts = self._open
        if self._sleeping is not None:
            raise UsageError("this LLM sleeps. Call wake() before update_weights(): its weights are not on the device")
        self._drain()
        try:
            return weights.update(parts.model, _weights(items), parts.axis)
        finally:  # some may be replaced when one is refused
            parts.loop.reset()

    def sleep(self) -> None:
        """Free the device: the cache is dropped, weights go to host memory. Requests stay, and go on after `wake`."""
        if self._sleeping is None:
            parts = self._open
            self._drain()
            parts.loop.reset()
            runners = self._runners
            for runner in runners:
                runner.release()
            self._sleeping = weights.parked(*(runner.entry.model for runner in runners))

    @torch.inference_mode(False)
    def wake(self) -> None:
        """Take the device again."""
        if self._sleeping is not None:
            self._sleeping.bring_back()
            self._sleeping = None
            for runner in self._runners:
                runner.cache.allocate()

    @property
    def _runners(self) -> list[Runner]:
        """That of the model, and that of a draft model."""
        return [each for each in (self._open.runner, self._open.draft) if each is not None]

    def _drain(self) -> None:
        """Finish the step that runs; weights that stream are where they rest then."""
        self._hand_out(self._open.loop.drain())
        if self._open.stream is not None:
            self._open.stream.park()

    def stats(self) -> dict[str, Any]:
        """Counts of now and sums since the start, for monitors."""
        parts = self._open
        found = parts.loop.scheduler.stats
        return {
            **asdict(found),
            "steps": parts.loop.steps,
            "step_seconds": parts.loop.step_seconds,
            "host_seconds": parts.loop.host_seconds,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "graphs": parts.runner.graphs,
            "cache_bytes": parts.runner.cache.plan.device_bytes,
            "entry": parts.runner.entry.how,
        }

    def close(self) -> None:
        """Free everything; the model computes again what its class does."""
        if self._parts is not None:
            self._parts.loop.drain()
            self._stack.close()
            self._parts = None  # type: ignore[assignment]
            self._requests.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt, text or token ids, as a list of one."""
    listed: list[Any] = [prompts] if isinstance(prompts, str) else _items(prompts)
    first = listed[0] if listed else None
    one = isinstance(first, Real) or (isinstance(first, Tensor) and not first.dim())
    return [listed] if one else listed


def _items(value: Any) -> list[Any]:
    if isinstance(value, (Tensor, numpy.ndarray)):
        value = value.tolist()
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"prompts are texts, or lists of token ids; found {printable(repr(value), 100)}")
    return list(value)


def _weights(items: weights.WeightItems) -> Iterator[tuple[str, Tensor] | Mapping[str, Tensor]]:
    for item in [items] if isinstance(items, Mapping) or not isinstance(items, Iterable) else items:
        pair = isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], str)
        if not (pair or isinstance(item, Mapping)):
            raise UsageError(
                f"update_weights: found {printable(repr(item), 100)}; it takes a mapping from names to tensors, pairs "
                "of both, or several mappings"
            )
        yield item


def _params(given: object) -> SamplingParams:
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise UsageError(f"params are {printable(repr(given), 100)}; they must be SamplingParams")
    return given


def _tokenizer(given: Any, folder: Any) -> Any:
    if given is not None and not isinstance(given, str) and not hasattr(given, "__fspath__"):
        return given
    if given is None and (folder is None or not any((folder / name).exists() for name in _TOKENIZER_FILES)):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given or folder)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; what is yielded counts one finished request."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda: bar.advance(task)
