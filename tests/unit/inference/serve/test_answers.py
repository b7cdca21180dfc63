"""Answers to completions, whole and as streams, over an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import json

import pytest

HELLO = "hello world"


def events(answer):
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(scene, text):
    async def go():
        async with scene() as made:
            return (await made.complete(prompt=HELLO)).json()

    found = asyncio.run(go())
    count = len(text.encode(HELLO))
    assert found["object"] == "text_completion"
    assert found["model"] == "fake"
    assert found["choices"] == [{"index": 0, "text": HELLO, "logprobs": None, "finish_reason": "stop"}]
    assert found["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": count,
        "total_tokens": 2 * count,
        "prompt_tokens_details": {"cached_tokens": count // 2},
    }


def test_a_chat(scene):
    async def go():
        async with scene() as made:
            return (await made.chat(HELLO)).json(), made.engine.seen

    found, seen = asyncio.run(go())
    (choice,) = found["choices"]
    assert found["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": f"<user>{HELLO}\n<assistant>"}
    assert seen[0][0][0] == 0  # the template's own first token, and only one of it
    assert seen[0][0].count(0) == 1


def test_fields_that_change_no_text_are_taken(scene):
    """What clients of OpenAI's service send beside what a model reads."""
    fields = {
        "metadata": {"run": "7"},
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "prompt_cache_key": "a",
        "prompt_cache_options": {"ttl": "30m"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "b",
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "tool_choice": "none",
        "tools": [],
        "user": "c",
    }

    async def go():
        async with scene() as made:
            plain = await made.chat(HELLO, stream=True)
            found = await made.chat(HELLO, stream=True, **fields)
            return plain, found

    plain, found = (events(answer) for answer in asyncio.run(go()))
    assert [event["choices"] for event in found[:-1]] == [event["choices"] for event in plain]


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("prompt", ["größer als zwölf 🦊 Häuser", "the quick brown fox"])
@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stop": ["fox", "als zw"]}, {"logprobs": True}])
def test_streams_say_what_whole_answers_say(scene, path, prompt, extra):
    options = dict(extra)
    if "logprobs" in extra:
        options = {"logprobs": 2} if path == "completions" else {"logprobs": True, "top_logprobs": 2}

    async def go():
        async with scene() as made:
            ask = made.complete if path == "completions" else made.chat
            given = {"prompt": prompt, "max_tokens": 200} if path == "completions" else {"content": prompt}
            whole = await ask(**given, **options)
            stream = await ask(**given, **options, stream=True, stream_options={"include_usage": True})
            assert whole.status_code == 200, whole.text
            return whole.json(), events(stream)

    whole, stream = asyncio.run(go())
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in stream[:-1])
    for choice in whole["choices"]:
        mine = [each for event in stream for each in event["choices"] if each["index"] == choice["index"]]
        if path == "chat":
            assert mine[0]["delta"]["role"] == "assistant"
            streamed, expected = (
                "".join(each["delta"].get("content", "") for each in mine),
                choice["message"]["content"],
            )
        else:
            streamed, expected = "".join(each["text"] for each in mine), choice["text"]
        assert streamed == expected
        assert [each["finish_reason"] for each in mine][-1] == choice["finish_reason"]
        assert all(each["finish_reason"] is None for each in mine[:-1])
        if extra.get("stop"):
            assert not any(stop in expected for stop in extra["stop"])
        if "logprobs" in extra:
            scores = [each["logprobs"] for each in mine if each["logprobs"]]
            name = "tokens" if path == "completions" else "content"
            assert [one for each in scores for one in each[name]] == choice["logprobs"][name]
            assert choice["logprobs"][name]


def test_a_stop_string_ends_the_work_too(scene):
    async def go():
        async with scene(pause=0.001) as made:
            answer = await made.complete(
                prompt="hello world, hello again", stop="world", ignore_eos=True, max_tokens=400
            )
            for _ in range(200):
                if made.engine.cancelled:
                    break
                await asyncio.sleep(0.005)
            return answer.json()["choices"][0], made.engine

    choice, engine = asyncio.run(go())
    assert choice == {"index": 0, "text": "hello ", "logprobs": None, "finish_reason": "stop"}
    assert engine.cancelled == [0]
    assert engine.stats()["running"] == 0
    assert engine.seen[0][1].stop == ()  # the text is this process' business


def test_scores_have_the_bytes_of_their_tokens(scene):
    async def go():
        async with scene() as made:
            return (await made.chat("ö🦊", logprobs=True, top_logprobs=1)).json()

    (choice,) = asyncio.run(go())["choices"]
    content = choice["logprobs"]["content"]
    joined = bytes(byte for each in content for byte in each["bytes"])
    assert joined.decode() == choice["message"]["content"]
    assert all(each["top_logprobs"][0]["logprob"] == -0.5 for each in content)


def test_offsets_of_scores_are_places_in_the_text(scene):
    async def go():
        async with scene() as made:
            return (await made.complete(prompt=HELLO, logprobs=1)).json()

    (choice,) = asyncio.run(go())["choices"]
    logprobs = choice["logprobs"]
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(name)
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert all(each["</s>"] == -2.0 for each in logprobs["top_logprobs"])


def test_several_prompts_of_several_kinds(scene, text):
    async def go():
        async with scene() as made:
            texts = (await made.complete(prompt=[HELLO, "fox"], n=2)).json()
            tokens = (await made.complete(prompt=[text.encode(HELLO), text.encode("fox")])).json()
            one = (await made.complete(prompt=text.encode(HELLO))).json()
            return texts, tokens, one

    texts, tokens, one = asyncio.run(go())
    assert [(each["index"], each["text"]) for each in texts["choices"]] == [
        (0, HELLO),
        (1, HELLO),
        (2, "fox"),
        (3, "fox"),
    ]
    assert [each["text"] for each in tokens["choices"]] == [HELLO, "fox"]
    assert [each["text"] for each in one["choices"]] == [HELLO]


def test_echo(scene):
    async def go():
        async with scene() as made:
            both = (await made.complete(prompt=HELLO, echo=True)).json()["choices"][0]
            alone = (await made.complete(prompt=HELLO, echo=True, max_tokens=0)).json()
            return both, alone

    both, alone = asyncio.run(go())
    assert both["text"] == HELLO + HELLO
    assert alone["choices"][0]["text"] == HELLO
    assert alone["choices"][0]["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompts_have_scores(scene, text, stream):
    prompt = "größer als hello world"

    async def go():
        async with scene() as made:
            answer = await made.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0, n=2, stream=stream)
            return events(answer) if stream else [answer.json()]

    ids = text.encode(prompt)
    for index in (0, 1):
        mine = [each for event in asyncio.run(go()) for each in event["choices"] if each["index"] == index]
        scores = [each["logprobs"] for each in mine if each["logprobs"]]
        found = {name: [one for each in scores for one in each[name]] for name in scores[0]}
        assert "".join(each["text"] for each in mine) == prompt
        assert len(found["tokens"]) == len(ids)
        assert found["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
        assert found["top_logprobs"] == [None, *({name: -0.25} for name in found["tokens"][1:])]
        for name, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
            assert prompt[offset:].startswith(name) or "\\x" in name


def test_token_ids_and_lengths(scene, text):
    async def go():
        async with scene() as made:
            longest = len(text.encode(HELLO)) + 2
            whole = (await made.complete(prompt=HELLO, return_token_ids=True, max_length=longest)).json()
            stream = events(await made.complete(prompt=HELLO, return_token_ids=True, max_tokens=3, stream=True))
            return whole["choices"][0], stream

    whole, stream = asyncio.run(go())
    tokens = text.encode(HELLO, special=False)
    assert whole["token_ids"] == tokens[:2]
    assert whole["finish_reason"] == "length"
    assert [each for event in stream for each in event["choices"][0].get("token_ids", ())] == tokens[:3]


def test_parameters_reach_the_engine(scene):
    given = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"7": 2},
        "seed": 3,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 2,
    }

    async def go():
        async with scene() as made:
            answer = await made.chat(**given, max_completion_tokens=4, priority=5, user="someone")
            assert answer.status_code == 200, answer.text
            schema = {"name": "x", "schema": {"type": "array"}}
            await made.chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=1)
            await made.chat(response_format={"type": "json_object"}, max_tokens=1)
            return made.engine.seen

    (_, params, priority), (_, by_schema, _), (_, by_object, _) = asyncio.run(go())
    assert {name: getattr(params, name) for name in given} == {**given, "logit_bias": {7: 2.0}}
    assert (params.max_tokens, priority) == (4, 5)
    assert by_schema.schema == {"type": "array"}
    assert by_object.schema == {"type": "object"}


def test_without_a_limit_a_chat_may_fill_the_context(scene):
    async def go():
        async with scene() as made:
            await made.chat()
            return made.engine.seen[0]

    prompt, params, _ = asyncio.run(go())
    assert params.max_tokens == 512 - len(prompt)


def test_many_at_once(scene):
    async def go():
        async with scene() as made:
            asked = [made.complete(prompt=f"hello {number}", max_tokens=30) for number in range(40)]
            return [each.json()["choices"][0]["text"] for each in await asyncio.gather(*asked)]

    assert asyncio.run(go()) == [f"hello {number}" for number in range(40)]
