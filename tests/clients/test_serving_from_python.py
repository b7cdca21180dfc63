"""`deepspeed.inference.pipeline`, `serve` and `client`, by the names of DeepSpeed-MII, with a small random Llama."""

from __future__ import annotations

import re
import threading
import urllib.request

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from deepspeed import inference
from deepspeed.errors import UsageError
from deepspeed.inference.deployments import DeploymentError
from tests.serving import save_model

pytestmark = pytest.mark.slow

PROMPTS = ["the quick brown fox", "größer 🦊", "hello"]
CACHE = {"state_manager": {"memory_config": {"mode": "allocate", "size": 200}, "block_size": 16}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    """Twelve greedy tokens by Transformers."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, reference = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        found.append(tokenizer.decode(made, skip_special_tokens=True))
    return found


def test_a_pipeline(model, expected):
    pipe = inference.pipeline(str(model), **CACHE)
    greedy = {"do_sample": False, "max_new_tokens": 12}
    assert [str(each) for each in pipe(PROMPTS, **greedy)] == expected
    (whole,) = pipe(PROMPTS[1], **greedy, return_full_text=True)
    assert whole.generated_text == PROMPTS[1] + expected[1]
    assert (whole.generated_length, whole.finish_reason) == (12, "length")
    assert [each.generated_length for each in pipe("hello", n=3, max_length=8, ignore_eos=True)] == [
        8 - len(pipe.tokenizer("hello").input_ids)
    ] * 3
    with pytest.raises(UsageError, match="has no argument 'temprature'"):
        pipe("hello", temprature=1)
    with pytest.raises(UsageError, match="max_length is 2"):
        pipe(PROMPTS, max_length=2)
    pipe.destroy()
    from transformers import LlamaForCausalLM

    pipe = inference.pipeline(LlamaForCausalLM.from_pretrained(model), **CACHE)
    with pytest.raises(UsageError, match="this model has no tokenizer; pass tokenizer="):
        pipe("hello")
    pipe.destroy()


def test_another_task_by_transformers_pipeline(model, tmp_path):
    import transformers

    config = transformers.AutoConfig.from_pretrained(model, num_labels=3, pad_token_id=2)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    plain = transformers.pipeline("text-classification", model=str(tmp_path))
    pipe = inference.pipeline(str(tmp_path), task="text-classification", dtype="fp32")
    for found, right in zip(pipe(PROMPTS), plain(PROMPTS), strict=True):
        assert found == {"label": right["label"], "score": pytest.approx(right["score"], abs=1e-5)}
    pipe.destroy()


def hits(client):
    """Prompt tokens that each replica found in its cache."""
    request = urllib.request.Request(f"{client.address}/metrics", headers=client._headers)
    with urllib.request.urlopen(request) as answer:
        found = re.findall(r"^deepspeed_prefix_hit_tokens_total{.*} (\d+)$", answer.read().decode(), re.MULTILINE)
    return sorted(int(each) for each in found)


def test_a_deployment(model, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = inference.serve(str(model), "mine", replica_num=2, max_length=300, **CACHE)
    try:
        greedy = {"do_sample": False, "max_new_tokens": 12}
        assert [str(each) for each in client.generate(PROMPTS, **greedy)] == expected
        again = inference.client("mine")
        pieces = []
        (whole,) = again.generate(PROMPTS[1], pieces.extend, **greedy)
        assert "".join(map(str, pieces)) == str(whole) == expected[1]
        assert sum(each.generated_length for each in pieces) == whole.generated_length == 12
        assert [each.finish_reason for each in client("hello", n=2, stop="a", max_length=40)]
        _prefixes_stay_at_a_replica(client)
        with pytest.raises(DeploymentError, match="runs already"):
            inference.serve(str(model), "mine")
        with pytest.raises(DeploymentError, match="context of 300"):
            client.generate("x " * 400, max_new_tokens=1)
        with pytest.raises(UsageError, match="a stream has one"):
            client.generate(PROMPTS, pieces.append)
        folder = tmp_path / "deepspeed" / "deployments" / "mine"
        assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}
        _ends_after_what_runs(client, again)
    finally:
        client.terminate_server()
    assert not {path.name for path in folder.iterdir()} & {"key", "server.json"}
    with pytest.raises(DeploymentError, match="no deployment 'mine' runs"):
        inference.client("mine")


def _prefixes_stay_at_a_replica(client):
    before = hits(client)
    prompt = "a long prefix of many tokens, " * 8
    for number in range(4):
        client.generate(prompt + str(number), max_new_tokens=1)
    gained = [after - then for after, then in zip(hits(client), before, strict=True)]
    assert gained[0] == 0
    assert gained[1] >= 3 * 64


def _ends_after_what_runs(client, other):
    begun, found = threading.Event(), []

    def ask():
        found.extend(other.generate("hello", lambda _: begun.set(), max_new_tokens=200, ignore_eos=True))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    client.terminate_server()
    thread.join(60)
    assert [(each.generated_length, each.finish_reason) for each in found] == [(200, "length")]


def test_a_deployment_that_cannot_start_shows_the_end_of_its_log(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (model / "template").write_text("{% if %}")
    with pytest.raises(DeploymentError, match=r"ended with exit code 1: .*chat template.* is not a Jinja template"):
        inference.serve(str(model), chat_template=model / "template", max_queue=3)
    with pytest.raises(UsageError, match=r"\.\."):
        inference.client("..")
