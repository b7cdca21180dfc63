"""`Service`: what answers share: the text side of the model, the replicas, and what requests must keep to.

`Router` says which replica gets a prompt: the one that has its prefix, unless it has much more to do than others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time
from typing import Protocol

from deepspeed.errors import UsageError
from deepspeed.generate.params import SamplingParams
from deepspeed.inference.server.engine import Ready
from deepspeed.inference.server.metrics import Metrics
from deepspeed.inference.server.refusal import RequestRefused
from deepspeed.inference.server.replica import Replica
from deepspeed.inference.server.text import TextModel

_CHUNK = 64  # tokens of a prefix that is remembered
_REMEMBERED = 1 << 16  # prefixes
_SLACK = 4  # requests that the replica with the prefix may have more than twice what the idlest has
_LONG_TEXT = 20_000  # characters, from which a thread makes the tokens: a few milliseconds


class Service:
    """Takes prompts as text or tokens and gives them to a replica."""

    def __init__(
        self, name: str, text: TextModel, replicas: Sequence[Replica], limits: Ready, metrics: Metrics, max_queue: int
    ) -> None:
        self.name = name
        self.text = text
        self.limits = limits
        self.metrics = metrics
        self.created = int(time())
        self.max_queue = max_queue
        self.lost = False
        self._replicas = replicas
        self._router = Router(replicas)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Handle what the engines send, in the running event loop."""

        def lose() -> None:
            self.lost = True
            on_loss()

        for each in self._replicas:
            each.watch(lose)

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(replica.waiting for replica in self._replicas)

    def metrics_text(self) -> str:
        """What `/metrics` says."""
        return self.metrics.text({replica.number: replica.stats for replica in self._replicas}, self.waiting)

    def check_model(self, name: str | None) -> None:
        """RequestRefused for another model than the one that is served."""
        if name not in (None, self.name):
            message = f"the model {name!r} is not served here; this server has {self.name!r}"
            raise RequestRefused(404, message, param="model", code="model_not_found")

    async def tokens_of(self, prompt: str | Sequence[int], *, special: bool) -> list[int]:
        """The tokens of a prompt; RequestRefused if the model cannot take them."""
        if not isinstance(prompt, str):
            self._check_tokens(prompt, "prompt")
            tokens = list(prompt)
        elif len(prompt) < _LONG_TEXT:
            tokens = self.text.encode(prompt, special=special)
        else:
            tokens = await asyncio.to_thread(self.text.encode, prompt, special=special)
        if not tokens:
            raise RequestRefused(400, "the prompt is empty; it must have at least one token", param="prompt")
        if len(tokens) >= self.limits.context:
            message = f"the prompt has {len(tokens)} tokens; the context of {self.limits.context} leaves no room"
            raise RequestRefused(400, f"{message} for an answer", param="prompt", code="context_length_exceeded")
        return tokens

    def fit(self, params: SamplingParams, longest: int, usual: int | None) -> SamplingParams:
        """The parameters as the engine gets them: this process looks for stop strings itself.

        `usual`: the most tokens where the request does not say; None for all that fit.
        """
        self._check_tokens(params.stop_token_ids, "stop_token_ids")
        self._check_tokens(tuple(params.logit_bias or ()), "logit_bias")
        room = self.limits.context - longest
        if params.max_tokens is not None and params.max_tokens > room:
            message = (
                f"max_tokens is {params.max_tokens} and the prompt has {longest} tokens; together they may have "
                f"{self.limits.context}, so max_tokens can be at most {room}"
            )
            raise RequestRefused(400, message, param="max_tokens", code="context_length_exceeded")
        most = params.max_tokens or min(room, usual or room)
        try:
            return replace(params, stop=(), max_tokens=most)
        except UsageError as error:
            raise RequestRefused(400, str(error).removeprefix("SamplingParams: "), param="min_tokens") from error

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        foreign = next((each for each in tokens if not 0 <= each < self.limits.vocabulary), None)
        if foreign is not None:
            message = f"{what} has the token id {foreign}; the model's are 0 to {self.limits.vocabulary - 1}"
            raise RequestRefused(400, message, param=what)

    def admit(self, prompts: int) -> None:
        """RequestRefused if so many more prompts cannot be queued."""
        if self.lost:
            raise RequestRefused(503, "the engine ended; the server stops", code="engine_lost")
        if prompts > self.max_queue:
            raise RequestRefused(400, f"{prompts} prompts in one request; at most {self.max_queue} can wait at a time")
        if self.waiting + prompts > self.max_queue:
            message = f"{self.waiting} requests wait for their first token, and at most {self.max_queue} may; try later"
            raise RequestRefused(429, message, code="queue_full", retry_after=self.metrics.retry_after(self.waiting))

    def replica_for(self, prompt: Sequence[int]) -> Replica:
        """The replica that suits a prompt best."""
        return self._replicas[self._router.choose(prompt)]


class _Loaded(Protocol):
    @property
    def load(self) -> int: ...


class Router:
    """Remembers which replica computed which prefixes last."""

    def __init__(self, replicas: Sequence[_Loaded]) -> None:
        self._replicas = replicas
        self._homes: OrderedDict[int, int] = OrderedDict()  # chained hash of whole chunks → replica

    def choose(self, prompt: Sequence[int]) -> int:
        """The replica for a prompt, as its place in the list."""
        if len(self._replicas) == 1:
            return 0
        loads = [replica.load for replica in self._replicas]
        idlest = min(range(len(loads)), key=loads.__getitem__)
        prefixes = _prefixes(prompt)
        home = next((self._homes[each] for each in reversed(prefixes) if each in self._homes), idlest)
        chosen = home if loads[home] <= 2 * loads[idlest] + _SLACK else idlest
        for each in prefixes:
            self._homes[each] = chosen
            self._homes.move_to_end(each)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen


def _prefixes(prompt: Sequence[int]) -> list[int]:
    """A hash of each prefix that is a number of whole chunks."""
    found, before = [], 0
    for start in range(0, len(prompt) - _CHUNK + 1, _CHUNK):
        before = hash((before, tuple(prompt[start : start + _CHUNK])))
        found.append(before)
    return found
