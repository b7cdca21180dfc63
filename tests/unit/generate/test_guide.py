"""Sequences that follow a JSON schema, and the error where the package for it is missing."""

from __future__ import annotations

import json
import sys

import pytest

from deepspeed.errors import FeatureUnavailable, UsageError
from deepspeed.generate.llm import LLM
from deepspeed.generate.params import SamplingParams
from tests.unit.generate.families import small_cache, tiny

END = 256

SCHEMA = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ready", "kind"],
    "additionalProperties": False,
}


def of_bytes():
    """A token for each byte, and one for the end."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    letters = {letter: at for at, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters | {"<end>": END}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def test_text_follows_a_schema():
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    model = tiny(vocab_size=END + 1)
    model.generation_config.eos_token_id = END
    params = SamplingParams(max_tokens=60, seed=1, schema=SCHEMA)
    with LLM(model, small_cache(max_context=128), tokenizer=of_bytes()) as llm:
        guided, free = llm.generate([[65, 66], [65, 66]], [params, SamplingParams(max_tokens=4)], progress=False)
        with pytest.raises(UsageError, match="schema cannot be followed"):
            llm.submit([65], SamplingParams(schema={"type": "nothing"}))
    found = json.loads(guided.text)
    assert isinstance(found["ready"], bool)
    assert found["kind"] in ("a", "b")
    assert guided.finish_reason == "stop"
    assert len(free.token_ids) == 4


@pytest.mark.parametrize("end", [None, END])
def test_a_complete_text_ends(end):
    """Also where the model has no token for the end, or where that token ends nothing."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    model = tiny(vocab_size=END + 1)
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    tokenizer = of_bytes()
    if end is None:
        tokenizer.eos_token = None
    params = [
        SamplingParams(max_tokens=9, min_tokens=8, n=2, ignore_eos=True, schema={"enum": ["x", "y"]}),
        SamplingParams(max_tokens=9, ignore_eos=end is not None, schema={"type": "integer"}),
    ]
    with LLM(model, small_cache(max_context=128), tokenizer=tokenizer) as llm:
        *named, number = llm.generate([[65], [66]], params, progress=False)
    assert {one.text for one in named} <= {'"x"', '"y"'}
    assert {one.finish_reason for one in named} == {"stop"}
    assert number.text == str(int(number.text))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(tiny(), small_cache(), tokenizer=of_bytes()) as llm:
        with pytest.raises(FeatureUnavailable, match="pip install 'deepspeed"):
            llm.submit([65], SamplingParams(schema=SCHEMA))
        assert not llm.busy
