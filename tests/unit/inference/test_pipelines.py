"""What a call of a pipeline or of a client may say."""

from __future__ import annotations

import pytest

from deepspeed.errors import UsageError
from deepspeed.inference.pipelines import GenerateOptions, texts_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 3, "max_tokens": 4}, "max_new_tokens and max_tokens mean the same"),
        ({"do_sample": "no"}, "do_sample is 'no'; it must be true or false"),
        ({"return_full_text": 1}, "return_full_text is 1"),
        ({"max_length": "20"}, "max_length is '20'; it must be a whole number"),
        ({"colour": 1}, "no argument 'colour'"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(UsageError, match=message):
        GenerateOptions.read(given)


def test_none_is_what_was_not_given():
    nothing = dict.fromkeys(["do_sample", "return_full_text", "max_length", "max_new_tokens", "top_p"])
    assert GenerateOptions.read(nothing) == GenerateOptions.read({})
    assert "temperature" not in GenerateOptions.read({"do_sample": None}).sampling


def test_prompts():
    assert texts_of("ab") == ["ab"]
    assert texts_of(each for each in ("a", "b")) == ["a", "b"]
    for wrong in (None, 3, b"a", [3], ["a", None]):
        with pytest.raises(UsageError, match="a text or several texts"):
            texts_of(wrong)
