"""Clients that go away or read slowly, seen from the application: an ASGI call whose connection the test plays."""

from __future__ import annotations

import asyncio
import json

import pytest


class Connection:
    """A client of one request: `gone` closes it, and while `reads` is clear it takes no data."""

    def __init__(self, body):
        self.sent = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._data = json.dumps(body).encode()

    async def receive(self):
        if self._data is not None:
            data, self._data = self._data, None
            return {"type": "http.request", "body": data, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        self.sent.append(message)

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def call(self, app, path="/v1/completions"):
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await app({**scope, "http_version": "1.1", "scheme": "http"}, self.receive, self.send)


async def until(condition):
    async def look():
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(look(), 20)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["hello world", ["hello", "world", "fox"]])
def test_a_client_that_vanishes_is_cancelled_within_two_steps(scene, stream, prompts):
    async def go():
        async with scene(pause=0.02) as made:
            body = {"prompt": prompts, "max_tokens": 400, "ignore_eos": True, "stream": stream}
            connection = Connection(body)
            call = asyncio.create_task(connection.call(made.app))
            await until(lambda: made.engine.steps > 2)
            before = made.engine.steps
            connection.gone.set()
            await call
            await until(lambda: made.engine.stats()["running"] == 0)
            steps = made.engine.steps - before
            good = await made.complete(prompt="hello")
            return connection, steps, made.engine.cancelled, good, made.service.metrics.answers

    connection, steps, cancelled, good, answers = asyncio.run(go())
    assert steps <= 2
    assert cancelled == ([0] if isinstance(prompts, str) else [0, 1, 2])
    assert "[DONE]" not in connection.text
    assert good.status_code == 200
    assert answers["/v1/completions", 499] == 1


def test_a_slow_reader_delays_nothing_and_misses_nothing(scene):
    async def go():
        async with scene() as made:
            slow = Connection({"prompt": "the quick brown fox", "max_tokens": 100, "ignore_eos": True, "stream": True})
            slow.reads.clear()
            call = asyncio.create_task(slow.call(made.app))
            await until(lambda: made.engine.seen)
            others = [(await made.complete(prompt="hello world")).json() for _ in range(5)]
            await until(lambda: made.engine.stats()["running"] == 0)  # its blocks are free before it read anything
            assert slow.sent == []
            slow.reads.set()
            await call
            return slow, others

    slow, others = asyncio.run(go())
    assert [each["choices"][0]["text"] for each in others] == ["hello world"] * 5
    chunks = [json.loads(line[6:]) for line in slow.text.split("\n\n") if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text.startswith("the quick brown foxthe quick brown fox")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert slow.text.endswith("data: [DONE]\n\n")
    assert len(slow.sent) < 20  # what waited came at once


def test_a_lost_engine_is_503_before_the_first_token_and_an_error_event_after_it(scene):
    async def go():
        async with scene(pause=0.05) as made:
            body = {"prompt": "hello world", "max_tokens": 400, "ignore_eos": True}
            whole, stream = Connection(body), Connection({**body, "stream": True})
            calls = [asyncio.create_task(each.call(made.app)) for each in (whole, stream)]
            await until(lambda: stream.sent)
            made.lose()
            await asyncio.gather(*calls)
            after = await made.complete(prompt="hello")
            health = await made.client.get("/health")
            return whole, stream, after, health

    whole, stream, after, health = asyncio.run(go())
    assert whole.sent[0]["status"] == 503
    assert json.loads(whole.text)["error"]["code"] == "engine_lost"
    assert stream.sent[0]["status"] == 200
    assert json.loads(stream.text.split("data: ")[-1])["error"]["code"] == "engine_lost"
    assert "[DONE]" not in stream.text
    assert after.status_code == 503
    assert health.status_code == 503


def test_metrics(scene):
    async def go():
        async with scene() as made:
            await made.complete(prompt="hello world")
            await made.complete(prompt="hello world", top_p=0)
            return (await made.client.get("/metrics")).text, (await made.client.get("/")).text

    text, page = asyncio.run(go())
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['deepspeed_requests_total{path="/v1/completions",status="200"}'] == "1"
    assert values["deepspeed_requests_open"] == "0"
    assert values["deepspeed_time_to_first_token_seconds_count"] == "1"
    assert int(values["deepspeed_time_between_tokens_seconds_count"]) > 1
    assert values['deepspeed_cache_blocks{replica="0"}'] == "64"
    # the page reads names that are there, and nothing from elsewhere
    assert "http" not in page.replace('http-equiv="', "")
    kinds = {line.split()[2].removeprefix("deepspeed_") for line in text.splitlines() if line.startswith("# TYPE")}
    for name in ("generated_tokens_total", "requests_open", "requests_waiting", "cache_blocks", "cache_blocks_free"):
        assert name in kinds
        assert name in page
