"""Sampling parameters that cannot work name their field and their value."""

from __future__ import annotations

import pytest

from deepspeed.errors import UsageError
from deepspeed.generate.params import SamplingParams

WRONG = [
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -3, "at least 1"),
    ("max_tokens", 1.5, "whole number"),
    ("min_tokens", -1, "at least 0"),
    ("n", 0, "from 1 to"),
    ("n", 10**9, "from 1 to"),
    ("n", True, "whole number"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "hot", "number"),
    ("top_k", -1, "from 0 to"),
    ("top_k", 10**21, "from 0 to"),  # no number of 64 bits: the engine would fail
    ("top_p", 0, "above 0"),
    ("top_p", 1.1, "at most 1"),
    ("top_p", None, "at most 1"),
    ("min_p", -0.1, "from 0 to 1"),
    ("repetition_penalty", 0.0, "above 0"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("logit_bias", [1], "map"),
    ("logit_bias", {"a": 1.0}, "whole number"),
    ("logit_bias", {3: float("nan")}, "number"),
    ("logit_bias", {3: 1e300}, "or minus infinity"),  # no number of 32 bits: all sequences of a step would fail
    ("temperature", 1e-38, "from 1e-30"),
    ("repetition_penalty", 1e300, "to 1e\\+30"),
    ("stop", "", "not empty"),
    ("stop", ["a", ""], "not empty"),
    ("stop", [1], "strings"),
    ("stop", 5, "strings"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", "12", "list"),
    ("ignore_eos", 1, "true or false"),
    ("seed", 2**63, "from"),
    ("seed", 0.5, "whole number"),
    ("logprobs", -1, "from 0 to"),
    ("logprobs", 1000, "from 0 to"),
    ("prompt_logprobs", 21, "from 0 to"),
    ("schema", "{", "no JSON"),
    ("schema", "3", "object"),
    ("schema", 3, "JSON"),
]


@pytest.mark.parametrize(("field", "value", "wanted"), WRONG)
def test_wrong_values(field, value, wanted):
    with pytest.raises(UsageError, match=wanted) as error:
        SamplingParams(**{field: value})
    assert f"{field}" in str(error.value)
    shown = [value] if not isinstance(value, list | dict) else [value, *value]
    assert any(f" is {each!r};" in str(error.value) for each in shown) or isinstance(value, dict)


def test_min_tokens_above_max_tokens():
    with pytest.raises(UsageError, match="min_tokens is 5; it must be at most max_tokens, which is 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    SamplingParams(max_tokens=4, min_tokens=4)


def test_a_number_beyond_those_with_a_point():
    with pytest.raises(UsageError, match=r"temperature is 10+.*; it must be a finite number"):
        SamplingParams(temperature=10**400)


def test_values_that_work():
    params = SamplingParams(
        n=2,
        temperature=0,
        stop="a",
        stop_token_ids=(1,),
        logit_bias={2: -float("inf")},
        seed=-1,
        logprobs=0,
        schema={"type": "object"},
    )
    read_once = SamplingParams(stop=iter(["a"]), stop_token_ids=(each for each in [1]))
    assert (read_once.stop_strings, read_once.stop_token_ids) == (("a",), (1,))
    assert params.greedy
    assert params.stop_strings == ("a",)
    assert not SamplingParams().greedy
    assert SamplingParams(stop=["a", "b"], schema="{}").stop_strings == ("a", "b")
