"""`SamplingParams`: how one request is sampled and when it ends, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from numbers import Integral, Real
from typing import NoReturn

from deepspeed.errors import UsageError, printable

MAX_N = 1024
MAX_LOGPROBS = 20  # each asks for the most probable tokens of every position
_SEEDS = (-(2**63), 2**63 - 1)
_MOST_TOKENS = 2**31 - 1  # more than any vocabulary has
_SMALLEST, _LARGEST = 1e-30, 1e30  # what divides and multiplies logits of 32 bits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and limits of one request; a value that cannot work is a UsageError that names its field."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    schema: str | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_collections()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalised(self) -> bool:
        """Whether tokens depend on how often they occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("n", self.n, 1, MAX_N)
        _whole("top_k", self.top_k, 0, _MOST_TOKENS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, *_SEEDS)
        _real("temperature", self.temperature, 0, inf, "a finite number of at least 0 (0: greedy)")
        _real("top_p", self.top_p, 0, 1, "above 0 and at most 1", above=True)
        _real("min_p", self.min_p, 0, 1, "from 0 to 1")
        _real("repetition_penalty", self.repetition_penalty, 0, inf, "a finite number above 0", above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), -2, 2, "from -2 to 2")
        for name in ("temperature", "repetition_penalty"):
            if getattr(self, name) and not _SMALLEST <= getattr(self, name) <= _LARGEST:
                _refuse(name, getattr(self, name), f"from {_SMALLEST} to {_LARGEST}")
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "true or false")

    def _check_collections(self) -> None:
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", _items("stop", self.stop, "a string or a list of strings"))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "strings that are not empty")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                _refuse("logit_bias", self.logit_bias, "a map from token ids to numbers")
            for token, bias in self.logit_bias.items():
                _whole("logit_bias", token, 0)
                if bias != -inf:
                    wanted = f"a number from {-_LARGEST} to {_LARGEST}, or minus infinity"
                    _real(f"logit_bias[{token}]", bias, -_LARGEST, _LARGEST, wanted)
        if isinstance(self.schema, str):
            try:
                parsed = json.loads(self.schema)
            except ValueError as error:
                _refuse("schema", self.schema, f"a JSON schema; it is no JSON: {error}")
            if not isinstance(parsed, dict | bool):
                _refuse("schema", self.schema, "a JSON object")
        elif self.schema is not None and not isinstance(self.schema, Mapping):
            _refuse("schema", self.schema, "a JSON schema as text or as a map")


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        _refuse(name, value, wanted)
    if int(value) < least or (most is not None and int(value) > most):
        _refuse(name, value, wanted)


def _real(name: str, value: object, least: float, most: float, wanted: str, *, above: bool = False) -> None:
    """`above`: the least value itself is refused; infinity always is as the most."""
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(name, value, wanted)
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        number = inf
    if isnan(number) or number < least or number > most or number == inf or (above and number == least):
        _refuse(name, value, wanted)


def _items(name: str, value: object, wanted: str) -> Sequence[object]:
    """What is given, as a tuple if it may be an iterator, which can be read once."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, wanted)
    return value if isinstance(value, list | tuple) else tuple(value)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise UsageError(f"SamplingParams: {name} is {printable(repr(value), 200)}; it must be {wanted}")
