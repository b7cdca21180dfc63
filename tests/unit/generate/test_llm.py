"""`LLM`: requests, sampling, weights, memory, and answers to what cannot work."""

from __future__ import annotations

import gc
import random
import resource
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from deepspeed.errors import CheckpointError, DeepSpeedConfigError, UsageError
from deepspeed.generate import build
from deepspeed.generate.llm import LLM, Token
from deepspeed.generate.params import SamplingParams
from deepspeed.generate.scheduler import RequestTooLarge
from deepspeed.ops.capability import Capability, ProbeResult
from tests.unit.generate.families import greedy_of, prompts_of, scores_of, small_cache, tiny

GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(tiny(), small_cache()) as made:
        yield made


def drained(llm: LLM) -> dict[int, list[Token]]:
    """All tokens by uid."""
    found: dict[int, list[Token]] = {}
    while llm.busy:
        for token in llm.step():
            found.setdefault(token.uid, []).append(token)
    return found


def test_stream_and_steps_give_what_generate_gives(llm: LLM) -> None:
    prompts = prompts_of(4, 9)
    expected = [each.token_ids for each in llm.generate(prompts, GREEDY, progress=False)]
    assert [token.id for token in llm.stream(prompts[0], GREEDY)] == expected[0]
    uids = [llm.submit(prompt, GREEDY) for prompt in prompts]
    found = drained(llm)
    assert [[token.id for token in found[uid]] for uid in uids] == expected
    assert [found[uid][-1].finish_reason for uid in uids] == ["length", "length"]
    assert all(token.finish_reason is None for uid in uids for token in found[uid][:-1])
    assert found[uids[1]][0].prompt_tokens == 9


def test_generate_leaves_tokens_of_others(llm: LLM) -> None:
    prompts = prompts_of(4, 9)
    uid = llm.submit(prompts[0], GREEDY)
    llm.generate(prompts[1], GREEDY, progress=False)
    assert [token.id for token in drained(llm)[uid]] == greedy_of(llm.model, prompts[0], 5)


def test_each_reader_gets_its_own_tokens(llm: LLM) -> None:
    """Two streams that take turns, a call of `generate` and a request of `step`; one stream is closed early."""
    prompts = prompts_of(4, 9)
    expected = [greedy_of(llm.model, prompt, 5) for prompt in prompts]
    one, two = (llm.stream(prompt, GREEDY) for prompt in prompts)
    closed, first, second = llm.stream(prompts[0], GREEDY), [next(one).id], [next(two).id]
    next(closed)
    uid = llm.submit(prompts[1], GREEDY)
    assert llm.generate(prompts[0], GREEDY, progress=False)[0].token_ids == expected[0]
    first.append(next(one).id)
    closed.close()
    assert [token.id for token in drained(llm)[uid]] == expected[1]
    assert first + [token.id for token in one] == expected[0]
    assert second + [token.id for token in two] == expected[1]
    assert not llm._requests


def test_inference_mode_may_come_and_go() -> None:
    (prompt,), model = prompts_of(9), tiny()
    with torch.inference_mode():
        llm = LLM(model, small_cache())
        expected = llm.generate(prompt, GREEDY, progress=False)[0].token_ids
        llm.sleep()
        llm.wake()
        llm.update_weights(llm.model.state_dict())
    assert llm.generate(prompt, GREEDY, progress=False)[0].token_ids == expected
    llm.close()


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + each % 26) for each in ids)


def test_a_stop_string_within_accepted_guesses() -> None:
    """What a step gave after the string is dropped, with its log-probabilities."""
    params = partial(SamplingParams, max_tokens=24, temperature=0, logprobs=1)
    found = []
    for more in ({}, {"speculative": {"method": "ngram"}}):
        with LLM(tiny(), {**small_cache(), **more}, tokenizer=Letters()) as llm:
            (one,) = llm.generate([5, 6, 7, 8] * 6, params(stop="mmmm"), progress=False)
            assert one.logprobs is not None
            assert one.top_logprobs is not None
            assert len(one.token_ids) == len(one.logprobs) == len(one.top_logprobs) == llm.stats()["output_tokens"]
            found.append((one.token_ids, one.text))
            accepted = llm.stats()["accepted"]
    assert found[0] == found[1]
    assert accepted > 0


def test_a_draft_model_sleeps_too() -> None:
    (prompt,) = prompts_of(9)
    draft = {"method": "draft", "model": tiny(seed=1), "tokens": 2}
    with LLM(tiny(), {**small_cache(), "speculative": draft}) as llm:
        biased = SamplingParams(max_tokens=6, temperature=0, logit_bias={9: 0.5})
        expected = llm.generate(prompt, biased, progress=False)[0].token_ids
        assert not llm._parts.loop._drafter._sampler._biases, "nothing is kept of what has ended"  # type: ignore[union-attr]
        uid, runner = llm.submit(prompt, biased), llm._parts.draft
        tokens = [*llm.step(), *llm.step(), *llm.step()]
        llm.sleep()
        assert runner is not None
        assert not runner.cache._pages
        llm.wake()
        assert [token.id for token in (*tokens, *drained(llm)[uid])] == expected


def test_host_memory_of_layers_with_a_window() -> None:
    """Every block of host memory that is taken can be used."""
    with LLM(tiny("gemma2"), small_cache(blocks=40, host_cache=200_000)) as llm:
        cache = llm._parts.runner.cache
        assert llm.stats()["host_blocks"] == sum(len(each) for each in cache._host)
        assert sum(each.nbytes for each in cache._host) > 190_000


def test_a_seed_gives_the_same_tokens_in_any_batch(llm: LLM) -> None:
    prompts = prompts_of(4, 9, 3, 12)
    params = [SamplingParams(max_tokens=8, seed=number, top_p=0.9, n=3) for number in range(4)]
    together = llm.generate(prompts, params, progress=False)
    alone = [each for one in zip(prompts, params, strict=True) for each in llm.generate(*one, progress=False)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert together[0].token_ids != together[1].token_ids
    free = SamplingParams(max_tokens=8)
    assert (
        llm.generate(prompts[0], free, progress=False)[0].token_ids
        != llm.generate(prompts[0], free, progress=False)[0].token_ids
    )


def test_logprobs(llm: LLM) -> None:
    (prompt,) = prompts_of(7)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=2)
    (found,) = llm.generate(prompt, params, progress=False)
    scores = scores_of(llm.model, prompt + found.token_ids)
    assert found.top_logprobs is not None
    for at, tops in enumerate(found.top_logprobs):
        values, ids = scores[len(prompt) - 1 + at].topk(3)
        assert list(tops) == ids.tolist()
        torch.testing.assert_close(torch.tensor(list(tops.values())), values, rtol=1e-5, atol=1e-5)


def test_penalties_and_fewest_tokens(llm: LLM) -> None:
    (prompt,) = prompts_of(6)
    params = SamplingParams(max_tokens=20, temperature=0, repetition_penalty=50.0)
    (found,) = llm.generate(prompt, params, progress=False)
    assert len(set(found.token_ids + prompt)) == len(set(prompt)) + 20
    (first,) = llm.generate(prompt, GREEDY, progress=False)
    stop = first.token_ids[0]
    ended = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=[stop])
    assert llm.generate(prompt, ended, progress=False)[0].finish_reason == "stop"
    longer = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=[stop], min_tokens=3)
    (found,) = llm.generate(prompt, longer, progress=False)
    assert stop not in found.token_ids[:3]
    biased = SamplingParams(max_tokens=3, temperature=0, logit_bias={9: 100.0})
    assert llm.generate(prompt, biased, progress=False)[0].token_ids == [9, 9, 9]


def test_cancel_frees_blocks(llm: LLM) -> None:
    free = llm.stats()["free_blocks"]
    uid = llm.submit(prompts_of(9)[0], SamplingParams(max_tokens=40, n=2))
    other = llm.submit(prompts_of(5)[0], GREEDY)
    llm.step()
    llm.cancel(uid)
    assert set(drained(llm)) == {other}
    assert llm.stats()["free_blocks"] == free


def test_nan_ends_one_request() -> None:
    """A model whose logits are NaN after one token: the others go on."""
    model = tiny()
    model.get_input_embeddings().weight.data[7] = float("nan")
    with LLM(model, small_cache()) as llm:
        good, bad = prompts_of(6)[0], [5, 7, 9]
        good = [token for token in good if token != 7]
        completions = llm.generate([good, bad], GREEDY, progress=False)
        assert [each.finish_reason for each in completions] == ["length", "error"]
        assert completions[1].token_ids == []
        assert completions[0].token_ids == greedy_of(model, good, 5)
        assert llm.generate(good, GREEDY, progress=False)[0].token_ids == completions[0].token_ids


def test_update_weights_and_sleep() -> None:
    model, other = tiny(), tiny(seed=1)
    (prompt,) = prompts_of(9)
    with LLM(model, small_cache()) as llm:
        before = llm.generate(prompt, GREEDY, progress=False)[0].token_ids
        items = dict(other.state_dict())
        assert llm.update_weights(items.items()) == len(items)
        after = llm.generate(prompt, GREEDY, progress=False)
        assert after[0].token_ids == greedy_of(other, prompt, 5) != before
        assert after[0].cached_tokens == 0
        uid = llm.submit(prompt, GREEDY)
        first = [token.id for token in llm.step()]
        llm.sleep()
        with pytest.raises(UsageError, match="sleeps"):
            llm.step()
        llm.wake()
        assert first + [token.id for token in drained(llm)[uid]] == after[0].token_ids
        with pytest.raises(UsageError, match="no parameter 'nothing'"):
            llm.update_weights([dict(model.state_dict()), {"nothing": torch.zeros(1)}])
        assert llm.generate(prompt, GREEDY, progress=False)[0].cached_tokens == 0, "what came before counts"
        with pytest.raises(UsageError, match=r"model.norm.weight has the shape \(3,\)"):
            llm.update_weights({"model.norm.weight": torch.zeros(3)})


def test_two_engines_and_what_close_leaves() -> None:
    names = set(AttentionInterface._global_mapping)
    one, two = tiny(), tiny("bloom")
    used = one.config._attn_implementation
    engines = [LLM(one, small_cache()), LLM(two, small_cache()), LLM(one, small_cache())]
    (prompt,) = prompts_of(9)
    uids = [llm.submit(prompt, GREEDY) for llm in engines]
    found: list[list[int]] = [[], [], []]
    while any(llm.busy for llm in engines):
        for tokens, llm, uid in zip(found, engines, uids, strict=True):
            tokens += [token.id for token in llm.step() if token.uid == uid]
    assert found == [greedy_of(model, prompt, 5) for model in (one, two, one)]
    pages = [weakref.ref(llm._parts.runner.cache.layer(0).keys) for llm in engines]
    for llm in engines:
        llm.close()
        llm.close()
    del llm, engines
    gc.collect()
    assert [page() for page in pages] == [None] * 3
    assert set(AttentionInterface._global_mapping) == names
    assert one.config._attn_implementation == used
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
    assert "forward" not in one.model.layers[0].self_attn.__dict__


@pytest.mark.slow
@pytest.mark.parametrize("turns", [12, 200])
def test_random_schedules(turns: int) -> None:
    """On a cache that is too small, tokens are those of an engine that has room."""
    model = tiny()
    with LLM(model, small_cache()) as roomy:
        prompts = prompts_of(*range(1, 21))
        prompts[10:15] = [prompts[9] + prompt[:6] for prompt in prompts[10:15]]  # a prefix that is shared
        pairs = roomy.generate(prompts, SamplingParams(max_tokens=12, seed=3, n=2), progress=False)
        expected = {(at // 2, each.index): each.token_ids for at, each in enumerate(pairs)}
    chosen = random.Random(0)
    with LLM(model, small_cache(blocks=12, host_cache=20_000)) as llm:
        for turn in range(turns):
            llm._parts.loop._depth = turn % 2
            waiting = chosen.sample(range(20), chosen.randint(1, 6))
            uids: dict[int, int] = {}
            found: dict[tuple[int, int], list[int]] = {}
            while waiting or llm.busy:
                if waiting and chosen.random() < 0.6:
                    number = waiting.pop()
                    params = SamplingParams(max_tokens=chosen.randint(1, 12), seed=3, n=chosen.randint(1, 2))
                    uids[llm.submit(prompts[number], params, priority=chosen.randint(0, 2))] = number
                if uids and chosen.random() < 0.05:
                    llm.cancel(chosen.choice(list(uids)))
                for token in llm.step():
                    found.setdefault((token.uid, token.index), []).append(token.id)
            for (uid, index), tokens in found.items():
                assert tokens == expected[uids[uid], index][: len(tokens)]
        stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["prefix_hit_tokens"] > 0
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["running"] == stats["waiting"] == stats["swapped"] == 0


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([3, 128], GREEDY, "token id 128, but the .*vocabulary ends at 127"),
        ([3, -1], GREEDY, "token id -1"),
        (list(range(3, 67)), GREEDY, "the prompt has 64 tokens"),
        ([3], SamplingParams(stop_token_ids=[500]), "stop_token_ids has the token id 500"),
        ([3], SamplingParams(logit_bias={500: 1.0}), "logit_bias has the token id 500"),
        ("text", GREEDY, "needs a tokenizer"),
        ([3], SamplingParams(stop="end"), "stop needs a tokenizer"),
        ([3], SamplingParams(schema="{}"), "llguidance|tokenizer"),
    ],
)
def test_bad_requests_leave_the_others_alone(llm: LLM, prompt: Any, params: SamplingParams, expected: str) -> None:
    uid = llm.submit([5, 6], GREEDY)
    with pytest.raises((UsageError, DeepSpeedConfigError), match=expected):
        llm.generate([[4, 5], prompt], params, progress=False)
    assert llm.stats()["waiting"] == 1, "nothing of it is left"
    assert len(drained(llm)[uid]) == 5


@pytest.mark.parametrize(("section", "key"), [("state_manager", "kv_dtype"), ("quantization", "quantization_mode")])
def test_devices_without_e4m3(section: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ProbeResult(False, "the GPU has compute capability 8.0, 8.9 is needed")
    monkeypatch.setattr(build, "on_cuda", ProbeResult(True, ""))
    monkeypatch.setattr(build, "has_e4m3", Capability("e4m3", lambda: old))
    with pytest.raises(DeepSpeedConfigError, match=rf"{section}\.{key} is 'fp8', but the GPU has .* 8\.0, 8\.9 is"):
        LLM(tiny(), {section: {key: "fp8"}})


def test_requests_that_can_never_fit() -> None:
    with LLM(tiny(), small_cache(blocks=3)) as llm, pytest.raises(RequestTooLarge):
        llm.submit(prompts_of(9)[0], SamplingParams(max_tokens=20))


def test_no_room_for_a_cache() -> None:
    with pytest.raises(UsageError, match=r"memory_config asks for 1000000000000 blocks, .* has .* free"):
        LLM(tiny(), small_cache(blocks=10**12))
    huge = {"state_manager": {"memory_config": {"size": 10**15}}}
    with pytest.raises(UsageError, match=r"there is no room for a cache: .* one block of 32 tokens takes"):
        LLM(tiny(), huge)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_the_default_cache_takes_memory_when_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    with_default = LLM(tiny("llama"))
    reserved = with_default.stats()["cache_bytes"]
    assert resident() - before < max(reserved // 4, 64 << 20)
    with_default.close()


def test_models_that_cannot_be_served() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

    mamba = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(UsageError, match=r"MambaForCausalLM cannot be served.*Mamba(Mixer|Block)"):
        LLM(mamba)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UsageError, match=r"encoder-decoder, whose encoder: T5Stack"):
        LLM(t5)
    kinds = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    both_ways = AutoModelForCausalLM.from_config(AutoConfig.for_model("big_bird", vocab_size=64, **kinds)).eval()
    with pytest.raises(UsageError, match="BigBirdForCausalLM cannot be served: its attention is not causal"):
        LLM(both_ways)
    with pytest.raises(UsageError, match="Linear cannot be served"):
        LLM(torch.nn.Linear(2, 2))


def test_closed() -> None:
    llm = LLM(tiny(), small_cache())
    stream = llm.stream([3], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.submit([3])
    with pytest.raises(UsageError, match="closed"):
        next(stream)  # which is not at its end


def test_arguments_of_other_kinds(llm: LLM) -> None:
    """Each is an answer that says what was found; arrays of token ids are prompts."""
    wrong: list[tuple[Any, Any, str]] = [
        (b"abc", GREEDY, "found b'abc'"),
        ([[3.7, 4.2]], GREEDY, r"found \[3.7, 4.2\]"),
        ([0.5], GREEDY, r"found \[0.5\]"),
        (None, GREEDY, "found None"),
        ({"prompt": 1}, GREEDY, "prompts are texts, or lists of token ids"),
        ([[3]], {"max_tokens": 2}, "params are {'max_tokens': 2}; they must be SamplingParams"),
        ([[3]], 3, "params are 3"),
        ([[3]], [{"max_tokens": 2}], "params are {'max_tokens': 2}"),
    ]
    for prompts, params, expected in wrong:
        with pytest.raises(UsageError, match=expected):
            llm.generate(prompts, params, progress=False)
    with pytest.raises(UsageError, match="priority is 'high'"):
        llm.submit([3], GREEDY, priority="high")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"update_weights: model.norm.weight is list"):
        llm.update_weights({"model.norm.weight": [1.0]})  # type: ignore[dict-item]
    for items, found in ((3, "found 3"), ([1, 2], "found 1"), ("ab", "found 'a'"), (torch.ones(2), "found tensor")):
        with pytest.raises(UsageError, match=f"update_weights: {found}"):
            llm.update_weights(items)  # type: ignore[arg-type]
    expected_ids = [each.token_ids for each in llm.generate([[3, 4], [5, 6]], GREEDY, progress=False)]
    for same in (torch.tensor([[3, 4], [5, 6]]), np.array([[3, 4], [5, 6]]), [torch.tensor([3, 4]), [5, 6]]):
        assert [each.token_ids for each in llm.generate(same, GREEDY, progress=False)] == expected_ids
    assert llm.generate(torch.tensor([3, 4]), GREEDY, progress=False)[0].token_ids == expected_ids[0]
    for dtype in ("int8", torch.int8, 3):
        with pytest.raises(UsageError, match="quantization_mode"):
            LLM(tiny(), dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the model is None"):
        LLM(None)


@pytest.mark.parametrize("memory", [{}, {"device": 0}])
def test_folders_that_are_not_whole(tmp_path: Path, memory: dict[str, Any]) -> None:
    for name in ("lacking", "cut", "strange", "pickled"):
        tiny().save_pretrained(tmp_path / name, max_shard_size="20KB" if name == "lacking" else "1GB")
    shard = sorted((tmp_path / "lacking").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        LLM(tmp_path / "lacking", memory=memory)
    with open(tmp_path / "cut" / "model.safetensors", "r+b") as file:
        file.truncate(3000)
    with pytest.raises(CheckpointError, match="cut"):
        LLM(tmp_path / "cut", memory=memory)
    (tmp_path / "strange" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="strange has no config of a model of Transformers"):
        LLM(tmp_path / "strange", memory=memory)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save({"a": partial(Path.touch, tmp_path / "ran")}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises((CheckpointError, UsageError), match="pickled"):
        LLM(tmp_path / "pickled", memory=memory)
    assert not (tmp_path / "ran").exists()
