"""The client of OpenAI against `ds_serve`: every path and option, many at once, ends of clients, servers and engines.

One server has a small random Llama on two ranks; another has engines that repeat their prompt in slow steps.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import runpy
import signal
import time
import urllib.request

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")

import openai

from deepspeed.errors import DeepSpeedError
from deepspeed.inference.server import cli
from tests.harness import ROOT
from tests.serving import CONTEXT, Served, make_fake, save_model, save_tokenizer

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
PROMPT = "the quick brown fox jumps over the lazy dog"
CHAT = [{"role": "system", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
BLOCKS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model):
    (model / "keys").write_text(f"another-key\n{KEY}\n")
    (model / "keys").chmod(0o600)
    cache = {"mode": "allocate", "size": BLOCKS}
    (model / "serve.json").write_text(json.dumps({"state_manager": {"memory_config": cache, "block_size": 16}}))
    (model / "template").write_text("{% for each in messages %}({{ each.role }}) {{ each.content }}\n{% endfor %}")
    files = {"config": "serve.json", "api-key-file": "keys", "chat-template": "template"}
    words = [f"--{flag}={model / name}" for flag, name in files.items()]
    with Served(model, *words, "--served-model-name=tiny", "--tp=2", f"--max-context={CONTEXT - 64}") as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def metric(server, name):
    request = urllib.request.Request(f"{server.address}/metrics")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    return float(re.search(rf"^deepspeed_{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])


def until(condition):
    """Wait for what happens within moments."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never happened")


def test_greedy_completions_and_scores_are_those_of_transformers(client, model):
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, reference = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    for prompt in (PROMPT, "größer 🦊"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        found = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=24, extra_body={"return_token_ids": True}
        )
        assert found.choices[0].token_ids == expected
        assert found.usage.prompt_tokens == ids.shape[1]
        scored = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        with torch.no_grad():
            table = reference(ids).logits[0, :-1].log_softmax(-1)
        own = table.gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert scored.choices[0].logprobs.token_logprobs == [None, *(pytest.approx(each, abs=1e-3) for each in own)]


def test_models(client):
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "deepspeed"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_options(client):
    given = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(**given, n=2, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    for choice in whole.choices:
        assert choice.finish_reason in ("length", "stop")
        assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in choice.logprobs.content)
        joined = bytes(byte for each in choice.logprobs.content for byte in each.bytes)
        assert joined.decode(errors="replace") == choice.message.content
    again = client.chat.completions.create(**given, n=2)
    assert [each.message.content for each in again.choices] == [each.message.content for each in whole.choices]
    assert again.usage.prompt_tokens_details.cached_tokens >= 16  # whole blocks of the same prompt
    text = f"(system) hello\n(user) {PROMPT}\n"  # by --chat-template, and without the token that begins a text
    assert client.completions.create(model="tiny", prompt=text).usage.prompt_tokens == again.usage.prompt_tokens + 1
    assert again.usage.total_tokens == again.usage.prompt_tokens + again.usage.completion_tokens

    stream = list(client.chat.completions.create(**given, n=2, stream=True, stream_options={"include_usage": True}))
    assert stream[-1].usage.completion_tokens == again.usage.completion_tokens
    for at in (0, 1):
        mine = [each for chunk in stream for each in chunk.choices if each.index == at]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == whole.choices[at].message.content
        assert mine[-1].finish_reason == whole.choices[at].finish_reason


def test_completion_options(client):
    given = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**given, prompt=[PROMPT, "hello"], echo=True, n=1, user="someone")
    assert [choice.text.startswith(prompt) for choice, prompt in zip(whole.choices, (PROMPT, "hello"), strict=True)]
    text = whole.choices[0].text.removeprefix(PROMPT)
    stop = text[3:5]
    cut = client.completions.create(**given, prompt=PROMPT, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = list(client.completions.create(**given, prompt=PROMPT, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in pieces) == cut.choices[0].text
    scored = client.completions.create(**given, prompt=PROMPT, logprobs=2).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.text_offset) == 12
    assert all(max(top.values()) == own for top, own in zip(scored.top_logprobs, scored.token_logprobs, strict=True))
    tokens = client.completions.create(**given, prompt=[[0, 7, 8], [0, 9]])
    assert len(tokens.choices) == 2
    biased = client.completions.create(
        **given, prompt=PROMPT, logit_bias={"100": 100}, extra_body={"return_token_ids": True}
    )
    assert biased.choices[0].token_ids == [100] * 12
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True, "priority": 1}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9, "temperature": 0.8}
    assert (
        client.completions.create(**{**given, **penalties}, prompt=PROMPT, extra_body=extra).usage.completion_tokens
        == 12
    )


def test_errors_are_the_clients(client, server):
    ask = client.chat.completions.create
    for wrong, part in (({"top_p": 0}, "top_p"), ({"n": 0}, "n is 0"), ({"tools": [{"type": "function"}]}, "tools")):
        with pytest.raises(openai.BadRequestError, match=part):
            ask(model="tiny", messages=CHAT, **wrong)
    with pytest.raises(openai.BadRequestError, match="context of 448") as caught:
        client.completions.create(model="tiny", prompt="x" * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="other"):
        ask(model="other", messages=CHAT)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * (33 << 20))
    assert large.value.status_code == 413
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_sixty_four_at_once(server):
    async def one(client, number):
        given = {"model": "tiny", "max_tokens": 4 + number % 13, "seed": number, "prompt": f"{PROMPT} {number}"}
        if number % 2:
            return (await client.completions.create(**given)).choices[0].text
        parts = [chunk.choices[0].text async for chunk in await client.completions.create(**given, stream=True)]
        return "".join(parts)

    async def go():
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY) as client:
            together = await asyncio.gather(*(one(client, number) for number in range(64)))
            alone = [await one(client, number) for number in range(0, 64, 9)]
        return together, alone

    together, alone = asyncio.run(go())
    assert [together[number] for number in range(0, 64, 9)] == alone


def test_a_client_that_vanishes_leaves_no_blocks(client, server):
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert metric(server, "cache_blocks_free") < BLOCKS
    until(lambda: metric(server, "cache_blocks_free") == BLOCKS)
    assert metric(server, "engine_running") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "perhaps"]}}}

    def ask():
        given = {"model": "tiny", "messages": CHAT, "response_format": form, "seed": 1, "stream": stream}
        found = client.chat.completions.create(**given)
        if not stream:
            return found.choices[0].message.content
        return "".join(each.choices[0].delta.content or "" for each in found)

    if importlib.util.find_spec("llguidance") is None:
        with pytest.raises(openai.BadRequestError, match="llguidance"):
            ask()
    else:
        assert json.loads(ask()) in ("yes", "perhaps")


def test_the_example(server, capsys, monkeypatch):
    words = [f"--address={server.address}", f"--key={KEY}", "--count=3"]
    monkeypatch.setattr("sys.argv", ["ask.py", *words])
    runpy.run_path(str(ROOT / "examples/serve/ask.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "the same as a stream:\nequal\n" in said
    assert "3 requests at once" in said


def test_a_killed_engine(tmp_path):
    """Of two: its requests fail, those of the other end as they should, and the server ends with a code."""

    async def go(served):
        client = openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
        endless = {"model": str(tmp_path), "prompt": PROMPT, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
        streams = [await client.completions.create(**endless, stream=True) for _ in range(4)]
        waits = [asyncio.create_task(client.completions.create(**endless)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        while served.open_requests() < 8:
            await asyncio.sleep(0.01)
        os.kill(served.engines()[0], signal.SIGKILL)
        whole = await asyncio.gather(*waits, return_exceptions=True)
        return whole, await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)

    async def read(stream):
        return [chunk async for chunk in stream][-1].choices[0].finish_reason

    (tmp_path / "fake.json").write_text(json.dumps({"pause": 0.05}))
    with Served(save_tokenizer(tmp_path), f"--config={tmp_path / 'fake.json'}", "--replicas=2", fake=True) as served:
        children = served.children()
        whole, streamed = asyncio.run(go(served))
        lost = [each for each in whole if isinstance(each, openai.InternalServerError)]
        assert [each.status_code for each in lost] == [503, 503]
        broken = [each for each in streamed if isinstance(each, openai.APIError)]
        assert len(broken) == 2
        assert [each.choices[0].finish_reason for each in whole if each not in lost] == ["length"] * 2
        assert [each for each in streamed if each not in broken] == ["length"] * 2
        assert served.process.wait(60) == 1
        assert served.process.stderr is not None
        assert "signal 9" in served.process.stderr.read()
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children))


def test_what_cannot_start_says_why(tmp_path):
    """In this process: the engine's process ends before it is ready."""
    wanted = cli.ServeOptions(str(save_tokenizer(tmp_path)), {"broken": True}, port=0)
    with pytest.raises(DeepSpeedError, match="this model cannot be loaded"):
        cli.serve(wanted, make_fake, on_ready=lambda _: pytest.fail("it started"))
