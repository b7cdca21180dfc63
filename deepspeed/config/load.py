"""The loader: source → raw dict → renamed → cleaned → validated schema, with the origin of every value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from deepspeed.config import auto, params, renamed
from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.config.clean import Findings, Problem, clean
from deepspeed.config.explain import values_of
from deepspeed.config.features import UNBUILT, missing_first
from deepspeed.config.read import ConfigSource, read
from deepspeed.config.schema import Schema
from deepspeed.config.shape import Model, keys_of
from deepspeed.config.values import from_text
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError, FeatureUnavailable
from deepspeed.log import warn_once

__all__ = ["BY_STRICT", "Loaded", "load"]

_FLAG = TypeAdapter(bool)
BY_STRICT = ' (an error because of "strict": true)'
"""What is added to what would be a warning otherwise."""


@dataclass(frozen=True)
class Loaded:
    """A validated config and how each of its values came about."""

    schema: Schema
    raw: dict[str, Any]
    source: str
    given: dict[str, str]
    """Usual path of every given key → the path as the user spelled it."""
    renamed: dict[str, str]
    """New path → the old one that was given."""
    autos: tuple[str, ...]
    """Keys left at "auto"; non-empty only for a partial config."""


def load(source: ConfigSource, *, partial: bool = False) -> Loaded:
    """Load a config; everything wrong with it is told in one DeepSpeedConfigError.

    A `partial` config may still hold "auto", as it does when a model is constructed before a client resolves it;
    such keys take their defaults.
    """
    raw, name = read(source)
    working, _ = read(raw)
    moved, wrong = renamed.apply(working)
    found = clean(working, Schema)
    problems = [Problem(path, text) for path, text in wrong] + found.problems
    problems += _check_params(found)
    if not partial:
        stage = found.data.get("zero_optimization", {})
        stage = stage.get("stage") if isinstance(stage, dict) else None
        problems += [Problem(path, auto.unresolved(path)) for path in found.autos if not auto.is_inert(path, stage)]
    if _is_strict(found):
        problems += [Problem(path, f"unknown key{BY_STRICT}") for path in found.aliens]
    schema = _validate(found, problems)
    texts = [] if schema is None else list(_numbers_as_text(found, schema))
    if _is_strict(found):
        problems += [Problem(each.path, f"{each.text}{BY_STRICT}") for each in texts]
    if problems:
        raise _error(missing_first(problems, found.data), name)
    assert schema is not None, "without a problem there is a schema"
    _tell(found, moved, name)
    for each in texts:
        warn_once(f"config: {each}")
    return Loaded(
        schema,
        raw,
        name,
        found.given,
        {move.new: move.old for move in moved},
        tuple(found.autos) if partial else (),
    )


def _is_strict(found: Findings) -> bool:
    """`strict` in any spelling that the schema takes for true; another value is the schema's to refuse."""
    try:
        return _FLAG.validate_python(found.data.get("strict", False))
    except ValidationError:
        return False


def _check_params(found: Findings) -> list[Problem]:
    problems: list[Problem] = []
    for section, check in (("optimizer", params.check_optimizer), ("scheduler", params.check_scheduler)):
        data = found.data.get(section)
        if isinstance(data, dict):
            problems += check(data, found.autos)
    return problems


def _validate(found: Findings, problems: list[Problem]) -> Schema | None:
    try:
        return Schema.model_validate(found.data)
    except ValidationError as error:
        for item in error.errors():
            text = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
            path = _path_of(item["loc"])
            shown = _shown(item.get("input"))
            if path and shown and not item["type"].startswith(("value_error", "assertion", "missing")):
                text = f"{text[0].lower()}{text[1:]}, found {shown}"
            # A section tells all its broken rules at once, a line each.
            problems.extend(Problem(found.given.get(path, path), line) for line in text.splitlines())
    return None


def _numbers_as_text(found: Findings, schema: Schema) -> Iterator[Problem]:
    """The keys at which text was read as a number or as true or false."""
    for path, value, _ in values_of(schema):
        given = found.values.get(path)
        pairs = zip(given, value, strict=False) if isinstance(given, list) else [(given, value)]
        for text, number in pairs:
            spelled = isinstance(number, bool) or (isinstance(number, (int, float)) and from_text(text) is not None)
            if isinstance(text, str) and spelled:  # a size such as "70GB" is meant to be text
                shown = json.dumps(number)
                yield Problem(found.given[path], f"the text {text!r} was read as {shown}; write {shown} without quotes")


def _path_of(loc: Iterable[int | str]) -> str:
    """pydantic's location as a dotted path of JSON keys; its marks for union members are left out."""
    path, model = "", cast(Model, Schema)
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        key = keys_of(model).get(part)
        if key is None and path and not _is_label(part):
            continue
        path = f"{path}.{key.json if key else part}" if path else (key.json if key else part)
        model = key.section if key is not None and key.section is not None else model
    return path


def _is_label(part: str) -> bool:
    """True for a name that a user gave (a metric, a group), False for pydantic's names of union members."""
    return not any(mark in part for mark in "[](),") and part not in ("int", "float", "str", "bool", "none", "function")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _error(problems: list[Problem], source: str) -> DeepSpeedConfigError:
    unique = list(dict.fromkeys(problems))
    kind = BatchSizeError if any(problem.path in (TRAIN, MICRO, STEPS) for problem in unique) else DeepSpeedConfigError
    if all(problem in (feature.problem for feature in UNBUILT) for problem in unique):
        kind = FeatureUnavailable
    if len(unique) == 1:
        return kind(str(unique[0]), path=unique[0].path)
    lines = "\n".join(f"  {problem}" for problem in unique)
    return kind(f"{len(unique)} problems in the config ({source}):\n{lines}", path=unique[0].path)


def _tell(found: Findings, moved: list[renamed.Applied], source: str) -> None:
    for move in moved:
        if move.tell:
            warn_once(f"config key '{move.old}' is the old name of '{move.new}'; please rename it")
    for path in found.aliens:
        warn_once(f"config key '{path}' is not known and is ignored ({source})")
