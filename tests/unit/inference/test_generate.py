"""`generate` of the engine takes what Transformers' takes, and returns what it returns."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import deepspeed
from deepspeed.log import logger
from tests.unit.inference.test_engine import ids, llama

PROMPTS = ids(3, 9)
MASK = torch.ones_like(PROMPTS)
PROMPTS[0, :4] = MASK[0, :4] = 0


@pytest.fixture(scope="module")
def pair():
    engine = deepspeed.init_inference(llama(), dtype="fp32")
    yield engine, llama()
    engine.destroy()


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 40},
        {},
        {"max_length": 20, "repetition_penalty": 1.3},
        {"max_new_tokens": 30, "eos_token_id": [5, 7, 9, 11, 100, 34]},
        {"min_new_tokens": 25, "max_new_tokens": 30, "eos_token_id": [5, 7, 9, 11, 100, 34]},
        {"max_new_tokens": 40, "eos_token_id": None},
        {"max_new_tokens": 40, "eos_token_id": torch.tensor(34), "pad_token_id": 3},
        {"max_new_tokens": 10, "eos_token_id": 1000, "pad_token_id": 3},
        {"max_new_tokens": 10, "input_ids": PROMPTS.int()},
        {"generation_config": GenerationConfig(max_new_tokens=40)},
        {"generation_config": GenerationConfig(max_length=20, pad_token_id=77)},
    ],
)
def test_greedy(pair, options):
    """With the end and the padding of the model's own generation config, where a call does not say others."""
    engine, plain = pair
    for each in (engine.module, plain):
        each.generation_config.eos_token_id = 86
    given = {"input_ids": PROMPTS, "attention_mask": MASK, **options}
    found, expected = engine.generate(**given), plain.generate(**given)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert engine._paged._llm is not None


def test_the_mask_is_found_by_padding(pair):
    engine, plain = pair
    assert torch.equal(engine.generate(PROMPTS, max_new_tokens=5), plain.generate(PROMPTS, max_new_tokens=5))


def test_sampling(pair):
    engine, _ = pair
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8, "attention_mask": MASK}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(engine.generate(PROMPTS, **options))
    assert found[0].shape == (6, 17)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[0][:, :9], PROMPTS.repeat_interleave(2, 0))
    assert not torch.equal(found[0][0], found[0][1])
    one = engine.generate(PROMPTS, do_sample=True, top_k=1, max_new_tokens=8, attention_mask=MASK)
    assert torch.equal(one, engine.generate(PROMPTS, max_new_tokens=8, attention_mask=MASK))


class Streamer:
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer(pair):
    engine, _ = pair
    streamer = Streamer()
    found = engine.generate(PROMPTS[1:2], max_new_tokens=6, streamer=streamer)
    assert streamer.ended
    assert streamer.got == found[0].tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"logits_processor": []}, "logits_processor"),
        ({"attention_mask": MASK.flip(1)}, "hides other tokens"),
        ({"max_new_tokens": 1020}, "more than max_out_tokens"),
        ({"max_new_tokens": 250}, "9 + 250 tokens are more than the 256 positions"),
        ({"do_sample": True, "top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_what_transformers_does(pair, options, reason):
    engine, _ = pair
    engine._paged._reasons.clear()
    seen = []
    listener = type("Listener", (), {"info": staticmethod(lambda text, *args: seen.append(text % args))})
    before = logger.info
    logger.info = listener.info
    try:
        given = {"attention_mask": MASK, "max_new_tokens": 4, **options}
        if options.get("max_new_tokens", 0) > 100:
            assert engine._paged(PROMPTS, **given) is None
        else:
            for _ in range(2):
                assert engine.generate(PROMPTS, **given) is not None
    finally:
        logger.info = before
    assert len(seen) == 1
    assert reason in seen[0]


def test_prompts_that_are_too_long():
    engine = deepspeed.init_inference(llama(), dtype="fp32", max_out_tokens=8)
    with pytest.raises(RuntimeError, match=r"the prompt has 9 tokens, more than max_out_tokens \(8\)"):
        engine.generate(PROMPTS)
