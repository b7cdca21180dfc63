"""The HTTP application: paths, keys, the size of bodies, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from deepspeed._package import __version__
from deepspeed.inference.server.answers import Answer, Asked
from deepspeed.inference.server.protocol import ChatRequest, CompletionRequest, parse
from deepspeed.inference.server.refusal import RequestRefused
from deepspeed.inference.server.service import Service

_BODY_SECONDS = 60.0  # for a client to send a body
_USUAL_TOKENS = 16  # of /v1/completions without max_tokens, as in OpenAI's service
_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def make_app(service: Service, *, keys: Sequence[str] = (), largest_body: int = 32 << 20) -> FastAPI:
    """The application for a service; with `keys`, a client must send one of them."""
    app = FastAPI(title="deepspeed", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_open_paths(service))
    app.include_router(_guarded_paths(service, largest_body), dependencies=[Depends(_guard(keys))])
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(Exception, _broken)
    return app


def _open_paths(service: Service) -> APIRouter:
    router = APIRouter()
    page = resources.files("deepspeed.inference.server").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/health")
    async def health() -> Response:
        if service.lost:
            return JSONResponse({"status": "engine lost"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "ok"})

    @router.get("/")
    async def load() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    return router


def _guarded_paths(service: Service, largest_body: int) -> APIRouter:
    router = APIRouter()
    entry = {"id": service.name, "object": "model", "created": service.created, "owned_by": "deepspeed"}
    entry["max_model_len"] = service.limits.context

    @router.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics_text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return entry

    body = Depends(_body_reader(largest_body))

    @router.post("/v1/completions")
    async def completions(data: bytes = body) -> Response:
        return Answer(service, await _completion(service, parse(CompletionRequest, data)))

    @router.post("/v1/chat/completions")
    async def chat(data: bytes = body) -> Response:
        return Answer(service, await _chat(service, parse(ChatRequest, data)))

    return router


async def _completion(service: Service, wanted: CompletionRequest) -> Asked:
    service.check_model(wanted.model)
    params = wanted.params()
    prompts = [await service.tokens_of(prompt, special=True) for prompt in wanted.prompts]
    if not prompts:
        raise RequestRefused(400, "prompt is an empty list; give at least one prompt", param="prompt")
    echoes = [p if isinstance(p, str) else service.text.decode(p) for p in wanted.prompts] if wanted.echo else []
    longest = max(map(len, prompts))
    usual = _USUAL_TOKENS
    if wanted.max_length is not None:
        usual = wanted.max_length - longest
        if usual < 1:
            message = f"max_length is {wanted.max_length} and the prompt has {longest} tokens; nothing is left"
            raise RequestRefused(400, message, param="max_length")
    return Asked(wanted, prompts, params, service.fit(params, longest, usual), echoes, silent=wanted.max_tokens == 0)


async def _chat(service: Service, wanted: ChatRequest) -> Asked:
    service.check_model(wanted.model)
    params = wanted.params()
    text = service.text.render([message.plain() for message in wanted.messages], wanted.chat_template_kwargs)
    prompt = await service.tokens_of(text, special=False)
    return Asked(wanted, [prompt], params, service.fit(params, len(prompt), None))


def _guard(keys: Sequence[str]) -> Callable[[Request], None]:
    """Lets a request with one of the keys through; without keys, every request."""
    known = [key.encode() for key in keys]

    def check(request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # All are compared, so that the time says nothing.
        right = [hmac.compare_digest(key, given.strip().encode()) for key in known]
        if known and not (kind.lower() == "bearer" and any(right)):
            raise RequestRefused(
                401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    return check


def _body_reader(largest: int) -> Callable[[Request], Awaitable[bytes]]:
    """Reads a JSON body of limited size, in limited time."""

    async def read(request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another origin can send without being allowed to
            raise RequestRefused(400, f"the content type is {kind or 'missing'}; it must be application/json")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > largest:
            raise _too_large(largest)
        try:
            return await asyncio.wait_for(_limited(request, largest), _BODY_SECONDS)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes in Python 3.10
            raise RequestRefused(408, f"the body did not come within {_BODY_SECONDS:.0f} seconds") from error
        except ClientDisconnect as error:
            raise RequestRefused(400, "the connection closed before the body came") from error

    return read


async def _limited(request: Request, largest: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > largest:
            raise _too_large(largest)
        parts.append(part)
    return b"".join(parts)


def _too_large(largest: int) -> RequestRefused:
    return RequestRefused(413, f"the body is larger than {largest} bytes", code="body_too_large")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused), "registered for these alone"
    return JSONResponse(error.body, error.status, error.headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these alone"
    message = f"{request.method} {request.url.path} is not served here: {error.detail}"
    return JSONResponse(RequestRefused(error.status_code, message).body, error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse(RequestRefused(500, "the server failed; its log has the reason").body, 500)
