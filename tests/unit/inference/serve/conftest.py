"""An application over an engine without a model, in one process: its loop in a thread, its clients over ASGI."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import threading
from contextlib import asynccontextmanager

import httpx
import pytest

pytest.importorskip("fastapi")

from deepspeed.inference.server.app import make_app
from deepspeed.inference.server.engine import EngineLoop, Ready, lead
from deepspeed.inference.server.metrics import Metrics
from deepspeed.inference.server.replica import Replica
from deepspeed.inference.server.service import Service
from deepspeed.inference.server.text import TextModel
from tests.serving import CONTEXT, TEMPLATE, FakeEngine, make_tokenizer


@pytest.fixture(scope="session")
def text():
    return TextModel(make_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, TEMPLATE)


class Scene:
    """A service, its engine and a client of its application."""

    def __init__(self, service, engine, app, client, connection):
        self.service, self.engine, self.app, self.client = service, engine, app, client
        self._connection = connection

    def lose(self):
        """End the engine as a process that ends does."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    async def post(self, path, **body):
        return await self.client.post(path, json={"model": "fake", **body})

    async def complete(self, **body):
        return await self.post("/v1/completions", **body)

    async def chat(self, content="hello world", **body):
        messages = body.pop("messages", [{"role": "user", "content": content}])
        return await self.post("/v1/chat/completions", messages=messages, **body)


@pytest.fixture
def scene(text):
    """`async with scene(...) as made`: options of the application and of the engine."""

    @asynccontextmanager
    async def made(*, pause=0.0, max_queue=64, **options):
        ours, theirs = multiprocessing.Pipe()
        engine = FakeEngine(pause)
        thread = threading.Thread(
            target=lead, args=(theirs, EngineLoop(engine), Ready(320, CONTEXT, frozenset({FakeEngine.END})))
        )
        thread.start()
        metrics = Metrics()
        replica = Replica(0, ours, (), metrics, itertools.count())
        service = Service("fake", text, [replica], replica.ready(), metrics, max_queue)
        service.watch(lambda: None)
        app = make_app(service, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                yield Scene(service, engine, app, client, theirs)
        finally:
            replica.close()
            thread.join()
            theirs.close()

    return made
