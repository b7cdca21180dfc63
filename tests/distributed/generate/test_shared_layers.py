"""`LLM` on ranks that share every layer: the tokens of one process, on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import UsageError
from deepspeed.fusion import streamed
from deepspeed.generate import weights
from deepspeed.inference import LLM, SamplingParams
from tests.harness import ranks, shared_ranks
from tests.unit.generate.families import prompts_of, small_cache, tiny

pytestmark = pytest.mark.usefixtures("with_transformers")

GREEDY = SamplingParams(max_tokens=5, temperature=0, logprobs=0)
PROMPTS = (3, 4, 5, 13)
SAMPLE = ("llama", "gemma3_text", "qwen3_moe", "gpt2")
"""Heads that are shared, layers with a window, experts, one matrix of queries, keys and values."""


def same_everywhere(value: Any) -> bool:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(each == value for each in found)


def compare(kind: str, size: int, **changes: Any) -> None:
    with LLM(tiny(kind, **changes), small_cache()) as llm:
        expected = llm.generate(prompts_of(*PROMPTS), GREEDY, progress=False)
    with LLM(tiny(kind, **changes), small_cache(), tensor_parallel={"tp_size": size}) as llm:
        found = llm.generate(prompts_of(*PROMPTS), GREEDY, progress=False)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected], kind
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-5)


@shared_ranks(2)
def test_two_ranks():
    for kind in SAMPLE:
        compare(kind, 2)


@shared_ranks(2)
def test_what_a_request_asks_for_on_two_ranks():
    """Sampling without a seed, a full cache, rounded weights, speculation."""
    params = SamplingParams(max_tokens=8, n=2, top_p=0.9)
    shared = {"tensor_parallel": {"tp_size": 2}}
    with LLM(tiny(), small_cache(blocks=15), **shared) as llm:
        found = llm.generate(prompts_of(9, 10, 11, 12, 13), params, progress=False)
        assert same_everywhere([each.token_ids for each in found])
        assert llm.stats()["preemptions"] > 0
        items = dict(tiny(seed=1).state_dict())
        llm.update_weights(items)
        after = llm.generate(prompts_of(9), GREEDY, progress=False)
    with LLM(tiny(seed=1), small_cache()) as llm:
        assert llm.generate(prompts_of(9), GREEDY, progress=False)[0].token_ids == after[0].token_ids
    for keys in ({"quantization": {"quantization_mode": "w8a16"}}, {"speculative": {"method": "ngram"}}):
        with LLM(tiny(), small_cache(), **keys) as llm:
            expected = llm.generate(prompts_of(6)[0] * 3, GREEDY, progress=False)
        with LLM(tiny(), small_cache(), **keys, **shared) as llm:
            found = llm.generate(prompts_of(6)[0] * 3, GREEDY, progress=False)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected], keys


@shared_ranks(2)
def test_numbers_that_do_not_divide():
    with pytest.raises(UsageError, match="tp_size is 3, which does not divide 2 ranks"):
        LLM(tiny(), small_cache(), tensor_parallel={"tp_size": 3})
    compare("llama", 2, num_key_value_heads=1)  # both ranks have it
    compare("llama", 2, hidden_size=24, num_attention_heads=3, num_key_value_heads=3)  # two heads, and one


@ranks(4)
def test_four_ranks():
    compare("llama", 4, num_key_value_heads=4)
    compare("llama", 2)  # two groups of two ranks


@ranks(2)
def test_products_of_one_input_are_one():
    """Queries, keys and values, and gate and up, of what a rank has of them; experts beside them."""
    modes = {"llama": (None, "w4a16", "fp8"), "qwen2": (None, "w8a16"), "qwen3_moe": (None, "w8a16")}
    for kind, mode in ((kind, mode) for kind, some in modes.items() for mode in some):
        shared: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}, "quantization": {"quantization_mode": mode}}
        with ExitStack() as undo:
            llm = undo.enter_context(LLM(tiny(kind), small_cache(), **shared))
            expected = llm.generate(prompts_of(*PROMPTS), GREEDY, progress=False)
            weights.inject(llm.model, undo, streamed=True, joins=True)
            calls = {
                name: undo.enter_context(patch.object(streamed, name, wraps=getattr(streamed, name)))
                for name in ("streamed_linear", "streamed_gated", "packed_linear")
            }
            found = llm.generate(prompts_of(*PROMPTS), GREEDY, progress=False)
            many = {tuple(len(w) for w in call.args[1]) for call in calls["streamed_linear"].call_args_list}
            packed = {call.args[1].shape[0] for call in calls["packed_linear"].call_args_list}
            moe = kind == "qwen3_moe"
            assert (16, 8, 8) in many if mode is None else packed == ({32} if moe else {32, 64}), (kind, mode)
            assert calls["streamed_gated"].called == (mode is None and not moe)
        if mode in (None, "w8a16"):
            with LLM(tiny(kind), small_cache(), quantization={"quantization_mode": mode}) as llm:
                alone = llm.generate(prompts_of(*PROMPTS), GREEDY, progress=False)
            assert [each.token_ids for each in found] == [each.token_ids for each in alone], (kind, mode)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected], (kind, mode)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-5)
