"""Walks a raw config along the schema: unknown keys, `null`, `"auto"`, comments. Reports, never raises."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deepspeed.config.model import Key, Model, keys_of, places_of
from deepspeed.config.renamed import REMOVED

# Keys that clients put in the config for themselves and that only look like ours.
NOT_MISSPELLED = frozenset({"msamp"})
_ALIKE = 0.75


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known name that `key` is a misspelling of, or None if it looks like none of them.

    A misspelling is: the same letters in another case or with other separators, the same words in another order,
    an abbreviation of at least eight letters, or a few wrong, missing or swapped letters for its length.
    """
    plain = _letters(key)
    names = {_letters(name): name for name in sorted(known, reverse=True)}
    if key in NOT_MISSPELLED or len(plain) < 2:
        return None
    same = (name for letters, name in sorted(names.items()) if plain == letters or _words(key) == _words(name))
    if (found := next(same, None)) is not None:
        return found
    close = difflib.get_close_matches(plain, names, n=1, cutoff=_ALIKE)
    longer = [letters for letters in sorted(names) if len(plain) >= 8 and letters.startswith(plain)]
    return names[(close or longer)[0]] if close or longer else None


def _letters(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _words(key: str) -> list[str]:
    return sorted(word.rstrip("s") for word in re.split(r"[^a-z0-9]+", key.lower()) if word)


AUTO = "auto"
# Words that many sections use; one of them in a wrong place says nothing about where it belongs.
_COMMON = 2


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong, with the dotted path of its key."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


@dataclass
class Findings:
    """What a walk found; `data` is what is left to validate."""

    data: dict[str, Any] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Paths of keys that look like nothing in the schema."""
    autos: list[str] = field(default_factory=list)
    """Paths whose value is "auto" although the key does not own that word; they are not in `data`."""
    given: dict[str, str] = field(default_factory=dict)
    """Usual path of every key that was given → the path as the user spelled it."""
    values: dict[str, Any] = field(default_factory=dict)
    """Usual path of every key that is no section → its value before validation."""


def clean(raw: dict[str, Any], schema: Model) -> Findings:
    """Sort the keys of `raw` into what can be validated and what must be reported; `raw` is not changed."""
    found = Findings()
    _place_dotted(raw, schema, found)
    found.data = _object(raw, schema, _Place("", "", schema, found))
    return found


@dataclass(frozen=True)
class _Place:
    """Where the walk is: `path` in the usual spelling, `spelled` as the user wrote it."""

    path: str
    spelled: str
    root: Model
    found: Findings

    def inside(self, json: str, given: str | None = None) -> _Place:
        def join(parent: str, child: str) -> str:
            return f"{parent}{child}" if child.startswith("[") or not parent else f"{parent}.{child}"

        return _Place(join(self.path, json), join(self.spelled, given or json), self.root, self.found)


def _object(raw: dict[str, Any], model: Model, place: _Place) -> dict[str, Any]:
    """The known keys of one object of the config."""
    keys = keys_of(model)
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        key = keys.get(name)
        if key is None:
            if _unknown(name, model, place):
                kept[name] = value
            continue
        here = place.inside(key.json, name)
        place.found.given[here.path] = here.spelled
        _value(name, value, key, here, kept)
    return kept


def _value(name: str, value: Any, key: Key, here: _Place, kept: dict[str, Any]) -> None:
    """Keep the value of a known key, or leave it out where it says nothing."""
    if value is None and not key.optional:
        here.found.given.pop(here.path)
        return
    if isinstance(value, str) and value == AUTO and not key.owns_auto:
        here.found.autos.append(here.path)
        return
    section = key.section

    def inner(item: Any, at: _Place) -> Any:
        return _object(item, section, at) if section is not None and isinstance(item, dict) else item

    if section is not None and key.container == "dict" and isinstance(value, dict):
        kept[name] = {label: inner(item, here.inside(label)) for label, item in value.items()}
    elif section is not None and key.container == "list" and isinstance(value, list):
        kept[name] = [inner(item, here.inside(f"[{index}]")) for index, item in enumerate(value)]
    elif section is not None:
        kept[name] = inner(value, here)
    elif key.free and isinstance(value, dict):
        kept[name] = _free(value, here)
    else:
        kept[name] = here.found.values[here.path] = value


def _free(value: dict[str, Any], place: _Place) -> dict[str, Any]:
    """An object with names of its own: only "auto" is looked for."""
    kept: dict[str, Any] = {}
    for name, item in value.items():
        here = place.inside(name)
        if here.path in REMOVED:
            place.found.problems.append(ConfigProblem(here.path, REMOVED[here.path]))
        elif isinstance(item, str) and item == AUTO:
            place.found.autos.append(here.path)
        else:
            kept[name] = item
        place.found.given[here.path] = here.spelled
    return kept


def _unknown(name: str, model: Model, place: _Place) -> bool:
    """Say what an unknown key was meant to be; True if it is kept, unread, as a key of a feature that is not here."""
    found, here = place.found, place.inside(name)
    if here.path in REMOVED:
        found.problems.append(ConfigProblem(here.spelled, REMOVED[here.path]))
        return False
    if name.startswith(("_", "//", "#", "$")):  # a comment
        return False
    if model.model_config.get("extra") == "allow":
        found.given[here.path] = here.spelled
        return True
    meant = nearest(name, keys_of(model))
    elsewhere = places_of(place.root).get(name, ())
    if meant is not None:
        found.problems.append(ConfigProblem(here.spelled, f"unknown key; did you mean {meant!r}?"))
    elif 0 < len(elsewhere) <= _COMMON:
        parents = " or ".join(repr(parent) if parent else "the top level" for parent in elsewhere)
        found.problems.append(ConfigProblem(here.spelled, f"unknown key here; it belongs under {parents}"))
    else:
        found.unknown.append(here.spelled)
    return False


def _place_dotted(raw: dict[str, Any], schema: Model, found: Findings) -> None:
    """`"zero_optimization.reduce_bucket_size": 1` at the top level, as some clients write it.

    It sets the nested key unless that is given a value too. `raw` belongs to the loader, so it is changed in place.
    """
    for name in [name for name in raw if "." in name and isinstance(name, str)]:
        head, _, tail = name.partition(".")
        section = keys_of(schema).get(head)
        if section is None or section.section is None or tail not in keys_of(section.section):
            continue
        value = raw.pop(name)
        target = raw.get(section.json) if section.json in raw else raw.get(section.name)
        if target is None:
            target = raw[section.json] = {}
        key = keys_of(section.section)[tail]
        spellings = (key.json, key.name)
        if isinstance(target, dict) and all(target.get(spelled) in (None, AUTO) for spelled in spellings):
            for spelled in spellings:
                target.pop(spelled, None)
            target[tail] = value
