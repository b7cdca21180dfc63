"""Reads a config from where users keep it: a dict, a JSON or HJSON file, or base64 text."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspeed.errors import DeepSpeedConfigError

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]

_MOST_BYTES = 2**26  # a device would give bytes without end


class RawConfig(NamedTuple):
    """A config as it is given: plain dicts and lists that nothing else holds, and where it came from, for messages."""

    values: dict[str, Any]
    source: str


def read(source: ConfigSource | RawConfig) -> RawConfig:
    """The config at a source; one that is read already is what it is."""
    if isinstance(source, RawConfig):
        return source
    if isinstance(source, Mapping):
        try:
            return RawConfig(_own(source, ""), "the given dict")
        except RecursionError:
            raise DeepSpeedConfigError("the given dict contains itself, or is nested too deeply") from None
    if not isinstance(source, (str, os.PathLike)):
        raise DeepSpeedConfigError(
            f"a config is a dict, the path of a JSON or HJSON file, or base64 text; found {type(source).__name__}"
        )
    path = os.fspath(source)
    if os.path.exists(path):
        return RawConfig(_parse(_text_of(path), path), path)
    return RawConfig(_parse(_decode(path), "base64 text"), "base64 text")


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:  # a pipe is as good as a file: configs are piped to `check`
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise DeepSpeedConfigError(f"config file {path!r} has more than {_MOST_BYTES} bytes; that is no config")
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except (OSError, UnicodeDecodeError) as error:
        raise DeepSpeedConfigError(f"config file {path!r} cannot be read: {error}") from error


def _decode(text: str) -> str:
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        return base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise DeepSpeedConfigError(
            f"config {shown!r}: there is no such file in {os.getcwd()}, and it is not base64 text either. "
            "Give the path of a JSON file, a dict, or URL-safe base64 of the JSON text."
        ) from None


def _parse(text: str, source: str) -> dict[str, Any]:
    """JSON if it is JSON (which also knows Infinity), else HJSON; a key given twice is an error in both."""
    if not text.strip():
        raise DeepSpeedConfigError(f"{source} is empty; a config is a JSON object")
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in items:
            if key in table:
                found.append(key)
            table[key] = value
        return table

    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise DeepSpeedConfigError(f"{source}: nested too deeply to be a config") from None
    except ValueError as json_error:
        found.clear()
        data = _parse_hjson(text, source, pairs, json_error)
    if found:
        names = sorted(set(found))
        raise DeepSpeedConfigError(
            f"Duplicate keys in DeepSpeed config: {names} ({source}). Only the last of each would count; keep one.",
            path=names[0],
        )
    if not isinstance(data, dict):
        raise DeepSpeedConfigError(f"{source}: a config is a JSON object, found {type(data).__name__}")
    return data


def _parse_hjson(text: str, source: str, pairs: Any, json_error: ValueError) -> Any:
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=pairs)
    except IndexError as hjson_error:  # how the reader says that a text ends inside a string, such as after '''
        why = "it ends in the middle of a string or a comment"
        raise DeepSpeedConfigError(f"{source} is neither JSON ({json_error}) nor HJSON ({why})") from hjson_error
    except (ValueError, RecursionError, OverflowError) as hjson_error:
        raise DeepSpeedConfigError(
            f"{source} is neither JSON ({json_error}) nor HJSON ({hjson_error})"
        ) from hjson_error


def _own(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
    """The dicts and lists of the caller's config, copied; leaves (dtypes, process groups) are shared."""
    copy: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise DeepSpeedConfigError(f"{path or 'the config'}: keys are text, found {key!r}", path=path)
        copy[key] = _own_any(item, f"{path}.{key}" if path else key)
    return copy


def _own_any(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return _own(value, path)
    if type(value) is list:
        return [_own_any(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return value
