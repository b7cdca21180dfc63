"""What the models look like from outside: keys, nested sections, which fields own the word "auto"."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed.config.model import ConfigModel

Model = type[ConfigModel]


@dataclass(frozen=True)
class Key:
    """One JSON key of a model."""

    name: str
    """The model's field."""
    json: str
    """The usual spelling in JSON: the alias where there is one, unless `usual_by_name`."""
    info: FieldInfo
    section: Model | None
    """The nested model, if the value is an object."""
    container: Literal["one", "dict", "list"]
    """Whether the value is that object itself, or names or a list of such objects."""
    optional: bool
    """`null` is a value of its own here."""
    owns_auto: bool
    """The word "auto" is a value of its own here."""
    free: bool
    """An object whose keys the schema does not name."""


@functools.cache
def keys_of(model: Model) -> dict[str, Key]:
    """Every accepted spelling of every key of a model."""
    table: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        section, container = _nested(info.annotation)
        key = Key(
            name=name,
            json=name if model.usual_by_name else info.alias or name,
            info=info,
            section=section,
            container=container,
            optional=type(None) in members_of(info.annotation),
            owns_auto=any(get_origin(m) is Literal and "auto" in get_args(m) for m in members_of(info.annotation)),
            free=section is None and any(m is dict or get_origin(m) is dict for m in members_of(info.annotation)),
        )
        table[name] = key
        table[info.alias or name] = key
    return table


def walk(model: Model, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key of a model and of the sections in it, with its dotted path, in the order of declaration."""
    for name in model.model_fields:
        key = keys_of(model)[name]
        path = f"{prefix}{key.json}"
        yield path, key
        if key.section is not None:
            inner = {"one": ".", "dict": ".<name>.", "list": "[]."}[key.container]
            yield from walk(key.section, path + inner)


@functools.cache
def places_of(model: Model) -> dict[str, tuple[str, ...]]:
    """Where each spelling of a key occurs: name → dotted paths of the sections that have it."""
    places: dict[str, list[str]] = {}
    for path, key in walk(model):
        parent = path[: -len(key.json)].rstrip(".")
        for spelling in {key.name, key.json}:
            places.setdefault(spelling, []).append(parent)
    return {name: tuple(found) for name, found in places.items()}


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: `A | None` → (A, NoneType), everything else is its own only one."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members_of(member))
    return (annotation,)


def _nested(annotation: Any) -> tuple[Model | None, Literal["one", "dict", "list"]]:
    for member in members_of(annotation):
        if isinstance(member, type) and issubclass(member, ConfigModel):
            return member, "one"
        origin, arguments = get_origin(member), get_args(member)
        if origin is dict and len(arguments) == 2:
            inner, _ = _nested(arguments[1])
            if inner is not None:
                return inner, "dict"
        if origin in (list, tuple) and arguments:
            inner, _ = _nested(arguments[0])
            if inner is not None:
                return inner, "list"
    return None, "one"
