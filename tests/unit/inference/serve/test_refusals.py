"""Bad input: each is a clear answer in OpenAI's format, and the server goes on."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.serving import CONTEXT

COMPLETION = {"prompt": "hello"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}

# path, fields → status, part of the message, field
BAD = [
    ("completions", {"prompt": ""}, 200, "", None),  # the tokenizer begins it with <s>
    ("completions", {"prompt": []}, 400, "empty list", "prompt"),
    ("completions", {"prompt": [[]]}, 400, "prompt is empty", "prompt"),
    ("completions", {}, 400, "prompt is missing", "prompt"),
    ("completions", {"prompt": 3}, 400, "prompt: ", "prompt"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt", None),
    ("completions", {"prompt": [320]}, 400, "token id 320; the model's are 0 to 319", "prompt"),
    ("completions", {"prompt": [-1]}, 400, "token id -1", "prompt"),
    ("completions", {"prompt": [7] * CONTEXT}, 400, f"has {CONTEXT} tokens; the context of {CONTEXT}", "prompt"),
    ("completions", {"prompt": [7] * 500, "max_tokens": 20}, 400, "max_tokens can be at most 12", "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": 0}, 400, "without echo", None),
    ("completions", {**COMPLETION, "max_tokens": -1}, 400, "max_tokens is -1", "max_tokens"),
    ("completions", {**COMPLETION, "max_length": 1}, 400, "max_length is 1", "max_length"),
    ("completions", {**COMPLETION, "logprobs": 21}, 400, "logprobs is 21", "logprobs"),
    ("completions", {**COMPLETION, "best_of": 3}, 400, "best_of is 3", None),
    ("completions", {**COMPLETION, "suffix": "x"}, 400, "suffix is not supported", "suffix"),
    ("completions", {"prompt": ["a"] * 65}, 400, "65 prompts in one request", None),
    ("chat/completions", {"messages": []}, 400, "messages", "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "type: Input should", None),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": 1}}, 400, "has 'messages'", None),
    ("chat/completions", {"messages": [{"role": "user", "colour": "x"}]}, 400, "'colour'", "messages.0.colour"),
    ("chat/completions", {**CHAT, "tools": [{}]}, 400, "tools is not supported: this server calls no tools", "tools"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice is not supported: this", "tool_choice"),
    ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, 400, "this server returns text", "modalities"),
    ("chat/completions", {**CHAT, "reasoning_effort": "low"}, 400, "chat_template_kwargs", "reasoning_effort"),
    ("chat/completions", {**CHAT, "verbosity": "low"}, 400, "verbosity is not supported", "verbosity"),
    ("chat/completions", {**CHAT, "store": "yes"}, 400, "store: ", "store"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "without logprobs", None),
    ("chat/completions", {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, 400, "give one of them", None),
    ("chat/completions", {**CHAT, "chat_template_kwargs": 1}, 400, "chat_template_kwargs", "chat_template_kwargs"),
    *(
        (path, {**body, **fields}, 400, part, field)
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT))
        for fields, part, field in [
            ({"top_p": 0}, "top_p is 0", "top_p"),
            ({"top_p": "1"}, "top_p: ", "top_p"),
            ({"n": 0}, "n is 0", "n"),
            ({"n": 1.5}, "n: ", "n"),
            ({"temperature": -1}, "temperature is -1", "temperature"),
            ({"stop": [""]}, "stop", "stop"),
            ({"stop": ["a"] * 65}, "65 strings", None),
            ({"stop_token_ids": [1000]}, "token id 1000", "stop_token_ids"),
            ({"logit_bias": {"1000": 1}}, "token id 1000", "logit_bias"),
            ({"logit_bias": {"x": 1}}, "logit_bias", None),
            ({"seed": 1 << 70}, "seed", "seed"),
            ({"min_tokens": 8, "max_tokens": 4}, "min_tokens is 8", "min_tokens"),
            ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?", "temprature"),
            ({"stream_options": {"include_usage": True}}, "without stream", None),
            ({"stream": True, "stream_options": {"usage": True}}, "'usage'", "stream_options.usage"),
            ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "json_schema is given with", "response_format"),
        ]
    ),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(scene, stream):
    """One server takes them all, and good requests after each."""

    async def go():
        wrong = []
        async with scene() as made:
            for path, body, status, part, field in BAD:
                asked = {"stream": True, **body} if stream and "without stream" not in part else body
                answer = await made.post(f"/v1/{path}", **asked)
                if status == 200:
                    assert answer.status_code == 200
                    continue
                found = answer.json()["error"]
                right = (answer.status_code, found["type"]) == (status, "invalid_request_error")
                if not right or part not in found["message"] or (field and found["param"] != field):
                    wrong.append((asked, answer.status_code, found))
                assert (await made.complete(**COMPLETION)).status_code == 200
        return wrong

    assert asyncio.run(go()) == []


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b"\0",
    ],
)
def test_what_is_no_json_object(scene, path, data):
    async def go():
        async with scene() as made:
            return await made.client.post(f"/v1/{path}", content=data, headers={"content-type": "application/json"})

    answer = asyncio.run(go())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_bodies_have_a_limit(scene):
    async def parts():
        for _ in range(100):
            yield b"x" * 100

    async def go():
        async with scene(largest_body=1000) as made:
            whole = await made.complete(prompt="x" * 1000)
            json_type = {"content-type": "application/json"}
            streamed = await made.client.post("/v1/completions", content=parts(), headers=json_type)
            other = await made.client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
            return whole, streamed, other

    whole, streamed, other = asyncio.run(go())
    for answer in (whole, streamed):
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
    assert other.status_code == 400
    assert "application/json" in other.json()["error"]["message"]


def test_keys(scene):
    async def go():
        async with scene(keys=["right", "other"]) as made:
            statuses = {}
            for name in ("", "Bearer wrong", "Bearer right", "bearer other", "Basic right", "Bearer", "Bearer ö"):
                headers = {"Authorization": name.encode()}
                statuses[name] = [
                    (await made.client.get("/v1/models", headers=headers)).status_code,
                    (await made.client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code,
                    (await made.client.get("/metrics", headers=headers)).status_code,
                ]
            refused = await made.client.get("/v1/models")
            return statuses, refused, [(await made.client.get(path)).status_code for path in ("/health", "/")]

    statuses, refused, open_paths = asyncio.run(go())
    assert {name for name, found in statuses.items() if found == [200] * 3} == {"Bearer right", "bearer other"}
    assert {tuple(found) for name, found in statuses.items()} == {(200,) * 3, (401,) * 3}
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert open_paths == [200, 200]


def test_models_and_paths(scene):
    async def go():
        async with scene() as made:
            get = made.client.get
            return [
                await made.complete(prompt="x", model="other"),
                await get("/v1/models/other"),
                await get("/v2/models"),
                await get("/v1/completions"),
                await get("/v1/models/fake"),
                await get("/v1/models"),
            ]

    other, missing, path, method, one, listed = asyncio.run(go())
    assert other.status_code == missing.status_code == path.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"
    assert "'fake'" in other.json()["error"]["message"]
    assert path.json()["error"]["param"] is None
    assert method.status_code == 405
    assert one.json()["id"] == "fake"
    assert listed.json()["data"] == [one.json()]


def test_a_full_queue_says_when_to_try_again(scene):
    async def go():
        async with scene(pause=0.2, max_queue=3) as made:
            answers = await asyncio.gather(*(made.complete(prompt="hello", max_tokens=2) for _ in range(6)))
            after = await made.complete(prompt="hello")
            return answers, after

    answers, after = asyncio.run(go())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 3
    assert [answer.status_code for answer in answers if answer not in refused] == [200] * 3
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert after.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_finite_fail_their_request_alone(scene, stream):
    async def go():
        async with scene() as made:
            bad, good = await asyncio.gather(
                made.complete(prompt=[5, 2], stream=stream), made.complete(prompt="hello", stream=stream)
            )
            return bad, good

    bad, good = asyncio.run(go())
    assert bad.status_code == 500
    assert bad.json()["error"]["code"] == "not_finite"
    assert good.status_code == 200


def test_a_template_may_refuse(scene, text):
    from deepspeed.inference.server.text import TextModel

    refusing = TextModel(text.tokenizer, {}, "{{ raise_exception('roles must alternate') }}")
    none = TextModel(text.tokenizer, {}, None)
    escaping = TextModel(text.tokenizer, {}, "{{ ''.__class__.__mro__ }}")

    async def go():
        found = []
        async with scene() as made:
            for each in (refusing, none, escaping):
                made.service.text = each
                found.append(await made.chat())
        return found

    refused, without, escaped = asyncio.run(go())
    assert {answer.status_code for answer in (refused, without, escaped)} == {400}
    assert "roles must alternate" in refused.json()["error"]["message"]
    assert "--chat-template" in without.json()["error"]["message"]
    assert json.dumps(escaped.json()).count("class") <= 1
