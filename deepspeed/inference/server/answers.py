"""`Answer`: the response to one completion, as a whole or as a stream of server-sent events.

[Note: cost of an event] A stream's chunk is two constant halves around its text, so a token costs one JSON string, not
one JSON object. A reader that is slower than the engine gets several tokens in one chunk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from time import monotonic, time
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deepspeed.generate.params import SamplingParams
from deepspeed.generate.sequence import Token
from deepspeed.inference.server.continuation import Continuation, TokenScore
from deepspeed.inference.server.protocol import ChatRequest, CompletionRequest
from deepspeed.inference.server.refusal import RequestRefused
from deepspeed.inference.server.replica import Replica, Ticket
from deepspeed.inference.server.service import Service

_GONE = 499  # the client closed the connection; only metrics see it
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its body, its prompts as tokens, and how they are sampled."""

    body: CompletionRequest | ChatRequest
    prompts: Sequence[Sequence[int]]
    wanted: SamplingParams
    params: SamplingParams  # the engine's, without stop strings
    echoes: Sequence[str] = ()  # texts before the answers, by prompt
    silent: bool = False  # no new text: the prompt is echoed alone

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.body, ChatRequest)


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int = 0
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by prompt

    def body(self) -> dict[str, Any]:
        """As the answer has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Answer(Response):
    """Submits a request, and answers it when the server calls it."""

    def __init__(self, service: Service, asked: Asked) -> None:
        super().__init__()
        self._service = service
        self._asked = asked
        self._ticket = Ticket()
        self._usage = Usage(prompt=sum(len(prompt) for prompt in asked.prompts))
        self._replicas: dict[int, tuple[int, Replica]] = {}  # by the engine's number: which prompt, and where it is
        self._texts: dict[int, Continuation] = {}  # by place in the answer
        self._open = len(asked.prompts) * asked.params.n
        self._started = False
        self._id = ("chatcmpl-" if asked.chat else "cmpl-") + uuid4().hex
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {"id": self._id, "object": kind, "created": int(time()), "model": service.name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the end, or until the client is gone; then nothing of the request stays in an engine."""
        metrics = self._service.metrics
        metrics.open += 1
        status = 200
        watcher = asyncio.create_task(self._notice_departure(receive))
        try:
            self._submit()
            await (self._stream(send) if self._asked.body.stream else self._whole(scope, receive, send))
        except RequestRefused as refused:
            status = refused.status
            if self._started:
                await send(_body(b"data: " + json.dumps(refused.body).encode() + b"\n\n", more=False))
            elif status != _GONE:
                response = JSONResponse(refused.body, status, refused.headers)
                await response(scope, receive, send)
        finally:
            watcher.cancel()
            for number, (_, replica) in self._replicas.items():
                replica.cancel(number)
            metrics.open -= 1
            metrics.answered(scope["path"], status, monotonic() - self._ticket.created)

    async def _notice_departure(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._ticket.fail(RequestRefused(_GONE, "the client closed the connection"))

    def _submit(self) -> None:
        asked = self._asked
        self._service.admit(len(asked.prompts))
        for at, prompt in enumerate(asked.prompts):
            replica = self._service.replica_for(prompt)
            number = replica.submit(self._ticket, prompt, asked.params, asked.body.priority)
            self._replicas[number] = (at, replica)
            for index in range(asked.params.n):
                echo = asked.echoes[at] if asked.echoes else ""
                self._texts[at * asked.params.n + index] = Continuation(
                    self._service.text, asked.wanted, self._service.limits.ends, echo=echo, silent=asked.silent
                )

    def _add(self, event: Token) -> tuple[int, Continuation] | None:
        """Put a token to its text; None if the text has ended by a stop string."""
        at, replica = self._replicas[event.uid]
        if event.prompt_scores:
            for each in range(self._asked.params.n):
                self._texts[at * self._asked.params.n + each].score_prompt(self._asked.prompts[at], event.prompt_scores)
        place = at * self._asked.params.n + event.index
        text = self._texts[place]
        if text.ended:
            return None
        if event.finish_reason == "error":
            raise RequestRefused(500, "the model gave no finite numbers for this request", code="not_finite")
        if event.finish_reason == "cancelled":
            raise RequestRefused(503, "the request was cancelled by the engine", code="cancelled")
        self._usage.cached[at] = event.cached_tokens
        self._usage.completion += not self._asked.silent
        if text.add(event):
            self._open -= 1
            if all(self._texts[place - event.index + each].ended for each in range(self._asked.params.n)):
                replica.cancel(event.uid)
        return place, text

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while self._open:
            for event in await self._ticket.take():
                self._add(event)
        choices = [self._choice(place, text) for place, text in sorted(self._texts.items())]
        body = {**self._head, "choices": choices, "usage": self._usage.body()}
        await JSONResponse(body)(scope, receive, send)

    def _choice(self, place: int, text: Continuation) -> dict[str, Any]:
        piece, scores, tokens = text.release()
        said = {"message": {"role": "assistant", "content": piece}} if self._asked.chat else {"text": piece}
        ids = {"token_ids": tokens} if self._asked.body.return_token_ids else {}
        logprobs = self._logprobs(scores)
        return {"index": place, **said, "logprobs": logprobs, "finish_reason": text.finish_reason, **ids}

    async def _stream(self, send: Send) -> None:
        halves = {place: self._halves(place) for place in self._texts}
        chunks = [self._chunk(place, {"role": "assistant", "content": ""}) for place in self._texts if self._asked.chat]
        while self._open:
            for event in await self._ticket.take():
                added = self._add(event)
                if added is not None:
                    self._append(chunks, halves, *added)
            if not self._started:  # only now, so that an error before the first token has a status of its own
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self._started = True
            if chunks:
                await send(_body(b"".join(chunks), more=True))
                chunks = []
        if self._asked.body.with_usage:
            chunks.append(_data({**self._head, "object": self._object, "choices": [], "usage": self._usage.body()}))
        await send(_body(b"".join([*chunks, b"data: [DONE]\n\n"]), more=False))

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._asked.chat else "text_completion"

    def _append(
        self, chunks: list[bytes], halves: Mapping[int, tuple[str, str]], place: int, text: Continuation
    ) -> None:
        """The chunk for what became visible of a text, if something did."""
        piece, scores, tokens = text.release()
        ids = tokens if self._asked.body.return_token_ids else None
        ended = text.ended
        if not (ended or scores or ids):
            if piece:
                before, after = halves[place]
                chunks.append((before + encode_basestring_ascii(piece) + after).encode())
            return
        said = {"content": piece} if self._asked.chat else piece
        scored = self._logprobs(scores)
        if self._asked.chat and ended:  # an end is a chunk of its own
            if piece or scores or ids:
                chunks.append(self._chunk(place, said, scored, tokens=ids))
            chunks.append(self._chunk(place, {}, None, text.finish_reason))
        else:
            chunks.append(self._chunk(place, said, scored, text.finish_reason, ids))

    def _chunk(
        self,
        place: int,
        said: Any,
        logprobs: Any = None,
        finish_reason: str | None = None,
        tokens: list[int] | None = None,
    ) -> bytes:
        what = "delta" if self._asked.chat else "text"
        choice = {"index": place, what: said, "logprobs": logprobs, "finish_reason": finish_reason}
        if tokens is not None:
            choice["token_ids"] = tokens
        usage = {"usage": None} if self._asked.body.with_usage else {}
        return _data({**self._head, "object": self._object, "choices": [choice], **usage})

    def _halves(self, place: int) -> tuple[str, str]:
        """A chunk without its text, before and after it."""
        mark = uuid4().hex
        whole = self._chunk(place, {"content": mark} if self._asked.chat else mark).decode()
        before, _, after = whole.partition(f'"{mark}"')
        return before, after

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self._asked.params.logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [score.entry() for score in scores], "refusal": None}
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [score.top() for score in scores],
            "text_offset": [score.offset for score in scores],
        }


def _data(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
