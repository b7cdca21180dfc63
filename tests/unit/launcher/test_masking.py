"""Secrets in what the launcher shows of a command: every way to write one, and what is left alone."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.environment import MASK, is_secret, mask_command, mask_secrets

X = "hunter2/+-9"

GIVEN = [
    ["--apikey", X],
    ["--apiKey", X],
    ["--auth", X],
    ["--wandb_api_key", f"-{X}"],
    ["--wandb_api_key", f"-{X}", "--lr", "1"],
    ["--token", X],
    [f"--token={X}"],
    [f"-token={X}"],
    ["--hf-token", X],
    ["--hf_token", X],
    ["--password", X],
    ["--db-passwd", X],
    ["--secret", X],
    ["--aws_secret_access_key", X],
    ["--credentials", X],
    ["--github-pat", X],
    ["--pwd", X],
    ["--token", ""],
    [f"PASSWORD={X}"],
    [f"2FA_TOKEN={X}"],
    [f"NAME_API_KEY={X}"],
    [f"OPENAI_API_KEY_2={X}"],
    [f"+logging.wandb.api_key={X}"],
    [f"--env=NAME_API_KEY={X}"],
    ["--env", f"HF_TOKEN={X}"],
    ["env", f"HF_TOKEN={X}", "python", "train.py"],
    ["bash", "-c", f"export NAME_API_KEY={X}; python train.py"],
    ["bash", "-c", f"export A=1 NAME_API_KEY='{X} {X}' && python train.py"],
    ["bash", "-c", f"python train.py --token {X} --lr 1"],
    ["bash", "-c", f"python train.py --token '{X} {X}'"],
    [f"--url=scheme://user:{X}@host/path"],
    ["--url", f"postgresql://user:a@{X}@host/db"],
    ["--proxy", f"http://:{X}@host:80"],
    ["--index", f"https://{X.replace('/', '')}@host/simple"],
    ["--data", f"https://host/blob?sv=1&sig={X}&se=2"],
    ["--data", f"https://host/blob?access_token={X}"],
    ["--data", f"https://host/blob?X-Amz-Signature={X}"],
    ["--header", f"Authorization: Bearer {X}"],
    ["--header", f"X-Api-Key: {X}"],
    ["--config", f'{{"comet": {{"api_key": "{X}"}}, "lr": 1}}'],
    ["--config", f"{{'password': '{X}'}}"],
]


@pytest.mark.parametrize("words", GIVEN, ids=" ".join)
def test_a_secret_is_masked(words):
    shown = mask_command(["python", "-u", "train.py", *words, "--lr", "0.1"])
    assert "hunter2" not in " ".join(shown)
    assert MASK in " ".join(shown)
    assert shown[-2:] == ["--lr", "0.1"]
    assert len(shown) == 5 + len(words)


@pytest.mark.parametrize(
    "words",
    [
        ["--max_tokens", "512"],
        ["--tokenizer", "gpt2"],
        ["--num_key_value_heads", "8"],
        ["--key_dim", "64"],
        ["--author", "me"],
        ["--passes", "3"],
        ["--output=out/a=b"],
        ["--data", "s3://bucket/x"],
        ["--repo", "ssh://git@host/x"],
        ["--url", "http://host:80/a"],
        ["--config", '{"lr": 0.1, "max_tokens": 5}'],
        ["C:\\data", "a:b", "-1", "", "--", "-"],
        ["--use_auth", "--lr", "1"],
    ],
    ids=" ".join,
)
def test_what_is_no_secret_is_shown(words):
    assert mask_command(words) == words


def test_an_option_without_a_value_masks_nothing_that_follows_it_later():
    assert mask_command(["--token", "--lr", "1", "x"]) == ["--token", "--lr", "1", "x"]
    assert mask_command(["--token", "a", "b"]) == ["--token", MASK, "b"]


@given(st.lists(st.text(max_size=40), max_size=8))
def test_any_words_at_all(words):
    shown = mask_command(words)
    assert len(shown) == len(words)
    for word in shown:
        assert mask_secrets(word) == word, "what has been masked stays as it is"


@given(
    st.sampled_from(["--api_key", "--auth", "--x-token", "--password"]),
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=12, max_size=40),
    st.sampled_from(["{0} {1}", "{0}={1}", "A=1 X{0}={1};b", "http://u:{1}@h {0}"]),
)
def test_a_value_is_never_seen(option, value, form):
    for words in ([form.format(option, value)], form.format(option, value).split(" ")):
        assert value not in " ".join(mask_command(words))


@pytest.mark.parametrize("unit", ["a", "a-", "a=", "-a ", "://:", "'a':", "a: ", "bearer ", "@", "key=", "'key':'"])
def test_long_words_take_linear_time(unit):
    """A config given as base64 text is one word of any length; trying it from every letter takes minutes."""
    began = time.process_time()
    mask_secrets("@" + unit * (200_000 // len(unit)))
    assert time.process_time() - began < 10


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "auth", "JWT"])
def test_names_of_secrets(name):
    assert is_secret(name)
