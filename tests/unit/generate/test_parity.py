"""Tokens and log-probabilities are those of Transformers' own models, however a step is put together."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.generate import attention
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.weights import inject
from tests.unit.generate.families import FAMILIES, greedy_of, prompts_of, scores_of, small_cache, tiny

GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=0)


def compare(model: Any, completions: list[Any]) -> None:
    """Every token is the most probable one, with the log-probability of a forward over the whole sequence."""
    for each in completions:
        whole = each.prompt_token_ids + each.token_ids
        scores = scores_of(model, whole)
        begin = len(each.prompt_token_ids)
        assert each.token_ids == scores[begin - 1 : -1].argmax(-1).tolist()
        own = scores[:-1].gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.logprobs), own[begin - 1 :], rtol=1e-5, atol=1e-5)
        if each.prompt_logprobs is not None:
            assert each.prompt_logprobs[0] is None
            torch.testing.assert_close(torch.tensor(each.prompt_logprobs[1:]), own[: begin - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind: str) -> None:
    model = tiny(kind)
    prompts = prompts_of(3, 4, 5, 13)  # below, at and above the border of a block, and cut in two
    with LLM(model, small_cache()) as llm:
        completions = llm.generate(prompts, GREEDY, progress=False)
    compare(model, completions)
    assert completions[3].token_ids == greedy_of(model, prompts[3], 6)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_late_rotation(kind: str) -> None:
    """Where fused kernels rotate, queries and keys are rotated with the writes to the pages."""
    model, asked = tiny(kind), []
    expected = [greedy_of(model, prompt, 6) for prompt in prompts_of(3, 13)]
    with ExitStack() as undo:
        inject(model, undo, streamed=False)
        with LLM(model, small_cache()) as llm:
            late = llm._parts.runner.entry._function.late
            assert len(late) == model.config.num_hidden_layers
            rotate = attention.rotary_write
            undo.enter_context(
                mock.patch.object(attention, "rotary_write", lambda *x: (asked.append(1), rotate(*x))[1])
            )
            completions = llm.generate(prompts_of(3, 13), GREEDY, progress=False)
            assert {(each.how, each.given) for each in late.values()} == {("at once", None)}
    assert len(asked) % len(late) == 0
    assert asked
    compare(model, completions)
    assert [each.token_ids for each in completions] == expected


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("host_cache", [0, 10_000_000])
def test_preemption_and_prefixes(kind: str, host_cache: int) -> None:
    """A cache that holds two of five sequences: they are preempted, come back, and find what they had."""
    model = tiny(kind)
    prompts = prompts_of(9, 10, 11, 12, 13)
    params = SamplingParams(max_tokens=14, temperature=0, logprobs=0)
    with LLM(model, small_cache(blocks=15, host_cache=host_cache)) as llm:
        completions = llm.generate(prompts, params, progress=False)
        stats = llm.stats()
        again = llm.generate(prompts[4], params, progress=False)
    compare(model, completions)
    compare(model, again)
    assert stats["preemptions"] > 0
    assert stats["running"] == stats["waiting"] == stats["swapped"] == 0
    assert kind == "gemma2" or again[0].cached_tokens >= 4  # what fell out of a window may be gone
    assert (stats["host_blocks"] > 0) == (host_cache > 0)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_any_chunks(budget: int) -> None:
    model = tiny("mistral")
    with LLM(model, small_cache(max_ragged_batch_size=budget, max_ragged_sequence_count=min(8, budget))) as llm:
        completions = llm.generate(prompts_of(3, 8, 17, 1), GREEDY, progress=False)
    compare(model, completions)


def test_asynchronous_steps() -> None:
    """A step is planned before the tokens of the one before are known; one token too many is dropped."""
    model = tiny()
    prompts = prompts_of(5, 9, 14)
    with LLM(model, small_cache()) as llm:
        plain = llm.generate(prompts, GREEDY, progress=False)
        llm._parts.loop._depth = 1
        ahead = llm.generate(prompts, GREEDY, progress=False)
    assert [each.token_ids for each in ahead] == [each.token_ids for each in plain]


@pytest.mark.parametrize("mode", [None, "w8a16"])
def test_deterministic(mode: str | None) -> None:
    """The bits of a sequence are the same alone and in a batch."""
    model = tiny()
    prompts = prompts_of(9, 4, 17, 30)
    params = SamplingParams(max_tokens=8, logprobs=0, seed=5)
    with LLM(model, small_cache(), deterministic=True, quantization={"quantization_mode": mode}) as llm:
        together = llm.generate(prompts, params, progress=False)
        alone = [llm.generate(prompt, params, progress=False)[0] for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.05, "seed": 3}])
def test_ngrams_change_nothing(params: dict[str, Any]) -> None:
    model = tiny()
    prompt = prompts_of(6)[0] * 4
    asked = SamplingParams(max_tokens=24, **params)
    with LLM(model, small_cache()) as llm:
        plain = llm.generate(prompt, asked, progress=False)
    with LLM(model, small_cache(), speculative={"method": "ngram", "tokens": 3}) as llm:
        guessed = llm.generate(prompt, asked, progress=False)
        stats = llm.stats()
    assert guessed[0].token_ids == plain[0].token_ids
    assert stats["drafted"] > 0


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_k": 5}])
@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_changes_nothing(params: dict[str, Any], same: bool) -> None:
    """Guesses of the model itself are all right, those of another one are not; tokens are the same."""
    model = tiny()
    prompts = prompts_of(6, 30, 9)
    asked = SamplingParams(max_tokens=13, **params)
    with LLM(model, small_cache()) as llm:
        plain = llm.generate(prompts, asked, progress=False)
    draft = tiny() if same else tiny("gemma2", seed=2)
    with LLM(model, small_cache(), speculative={"method": "draft", "model": draft, "tokens": 3}) as llm:
        guessed = llm.generate(prompts, asked, progress=False)
        again = llm.generate(prompts, asked, progress=False)
        stats = llm.stats()
    assert [each.token_ids for each in guessed] == [each.token_ids for each in plain]
    assert [each.token_ids for each in again] == [each.token_ids for each in plain]
    assert stats["drafted"] > 0
    assert (stats["accepted"] == stats["drafted"]) == same


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
    },
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("keys", [{}, {"speculative": {"method": "ngram", "tokens": 3}}, {"draft": True}, {"ahead": 1}])
def test_frequencies_that_follow_the_length(keys: dict[str, Any]) -> None:
    """Short and long sequences of a batch, and those that become long, are what Transformers makes of each alone."""
    model = tiny("phi3", **LONGROPE)
    asked = SamplingParams(max_tokens=12, temperature=0)
    prompts = [*prompts_of(5, 26, 32, 33, 40), prompts_of(7)[0] * 4]
    expected = [greedy_of(model, prompt, 12) for prompt in prompts]
    more: dict[str, Any] = (
        {"speculative": {"method": "draft", "model": model, "tokens": 3}} if "draft" in keys else keys
    )
    with LLM(model, small_cache(), **{name: value for name, value in more.items() if name != "ahead"}) as llm:
        llm._parts.loop._depth = keys.get("ahead", 0)
        for _ in range(2):  # with the prefixes of the first
            found = llm.generate(prompts, asked, progress=False)
            assert [each.token_ids for each in found] == expected
        assert llm.generate(prompts[4], asked, progress=False)[0].cached_tokens == 36
        stats = llm.stats()
        assert stats["free_blocks"] == stats["total_blocks"]
        assert "draft" not in keys or stats["accepted"] == stats["drafted"] > 0
    with LLM(model, small_cache(blocks=20), **more if "ahead" not in keys else {}) as llm:
        assert [each.token_ids for each in llm.generate(prompts, asked, progress=False)] == expected


def test_frequencies_of_models_that_compute_attention_themselves() -> None:
    model = tiny("falcon", **LONGROPE)
    with pytest.raises(UsageError, match="max_context, which is 64, to at most 32"):
        LLM(model, small_cache())
    LLM(model, small_cache(max_context=32)).close()


def test_a_draft_of_another_vocabulary() -> None:
    draft = tiny(vocab_size=64)
    with pytest.raises(UsageError, match="has a vocabulary of 64 tokens, but the model has 128"):
        LLM(tiny(), small_cache(), speculative={"method": "draft", "model": draft})
