"""Every key of the config and its default, frozen in config_keys.txt: a new key needs an edit there.

After a change that is meant, run `python -m tests.architecture.test_config_keys` and read the difference.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed.config.model import ConfigModel
from deepspeed.config.schema import Schema

KEYS = Path(__file__).with_name("config_keys.txt")


def nested(annotation: Any) -> tuple[type[ConfigModel] | None, str]:
    """The section inside an annotation, and how its keys hang below the key: `.`, `.<name>.` or `[].`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation, "."
    if origin is Annotated:
        return nested(arguments[0])
    if origin in (Union, types.UnionType):
        return next((found for member in arguments if (found := nested(member))[0] is not None), (None, ""))
    if origin in (dict, list):
        section, _ = nested(arguments[-1])
        return section, ".<name>." if origin is dict else "[]."
    return None, ""


def default_of(field: FieldInfo) -> str:
    """The default as JSON; a section's own default is an object whose keys follow."""
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ConfigModel):
        return "{...}"
    return json.dumps(value.value if isinstance(value, Enum) else value)


def fields_of(model: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field below a model with its dotted JSON path."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path, field
        section, joint = nested(field.annotation)
        if section is not None:
            yield from fields_of(section, path + joint)


def current() -> list[str]:
    """The lines that config_keys.txt should have."""
    return [f"{path} = {default_of(field)}" for path, field in fields_of(Schema)]


def test_the_frozen_list_is_the_schema():
    frozen, now = KEYS.read_text().splitlines(), current()
    added = [line for line in now if line not in set(frozen)]
    gone = [line for line in frozen if line not in set(now)]
    assert (added, gone) == ([], []), "the config's keys changed; if that is meant, edit config_keys.txt"
    assert frozen == now, "the order of the keys changed"


def test_every_key_says_what_it_does():
    for path, field in fields_of(Schema):
        text = field.description or ""
        assert len(text) > 10, f"{path} has no description"
        assert text.endswith("."), f"{path}: a description is a sentence"


def test_no_section_is_a_bare_object():
    """Objects without named keys are only those whose content belongs to somebody else."""
    free = {
        path
        for path, field in fields_of(Schema)
        if nested(field.annotation)[0] is None and "dict" in str(field.annotation)
    }
    assert free == {"optimizer.params", "scheduler.params", "autotuning.arg_mappings", "datastates_ckpt"}


if __name__ == "__main__":
    KEYS.write_text("\n".join(current()) + "\n")
