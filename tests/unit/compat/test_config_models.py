"""Configs that scripts declare on `DeepSpeedConfigModel`, and the helpers beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, dict_raise_error_on_duplicate_keys
from pydantic import Field, ValidationError

from deepspeed.errors import DeepSpeedConfigError


class Cache(DeepSpeedConfigModel):
    blocks: int = 4


class Serving(DeepSpeedConfigModel):
    size: int = Field(1, gt=0)
    cache: Cache = Cache()
    old_size: int | None = Field(None, json_schema_extra={"deprecated": True, "new_param": "size"})
    old_blocks: int | None = Field(
        None,
        json_schema_extra={"deprecated": True, "new_param": "cache.blocks", "new_param_fn": lambda kib: kib // 2},
    )
    gone: bool | None = Field(None, json_schema_extra={"deprecated": True})


def test_fields_are_assigned_and_validated():
    made = Serving(size=2)
    made.size = 3
    made.cache.blocks = 9
    assert (made.size, made.cache.blocks) == (3, 9)
    with pytest.raises(ValidationError):
        made.size = 0
    with pytest.raises(ValidationError):
        Serving(sise=2)


def test_auto_is_the_default_unless_strict():
    assert Serving(size="auto").size == 1
    with pytest.raises(ValidationError):
        Serving(strict=True, size="auto")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"old_size": 7}, lambda made: made.size == 7),
        ({"old_blocks": 8}, lambda made: made.cache.blocks == 4 and "blocks" in made.cache.model_fields_set),
        ({"gone": True}, lambda made: made.gone is True),
    ],
)
def test_a_deprecated_field_hands_its_value_on(given: dict[str, Any], found):
    assert found(Serving(cache=Cache(), **given))


def test_a_deprecated_field_and_its_successor_contradict():
    with pytest.raises(DeepSpeedConfigError, match="both 'old_size' and 'size' are given"):
        Serving(old_size=2, size=3)


def test_dicts():
    assert json.loads('{"a": 1, "b": 2}', object_pairs_hook=dict_raise_error_on_duplicate_keys) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="duplicate keys in the config: 'a'"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=dict_raise_error_on_duplicate_keys)
