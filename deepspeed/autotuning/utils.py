"""Values in nested configs by key, and JSON files that runs of the tuner leave."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def get_val_by_key(d: Mapping[str, Any], k: str) -> Any:
    """The value of the first key of that name at any depth, or at a dotted path below it; None where there is none."""
    if k in d:
        return d[k]
    head, _, rest = k.partition(".")
    if rest and head in d:
        return get_val_by_key(d[head], rest) if isinstance(d[head], Mapping) else None
    found = (get_val_by_key(value, k) for value in d.values() if isinstance(value, Mapping))
    return next((value for value in found if value is not None), None)


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Set every key of that name, at any depth."""
    if k in d:
        d[k] = vv
    for value in d.values():
        if isinstance(value, dict):
            set_val_by_key(value, k, vv)


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config with values at dotted paths; sections that are missing or switches are made."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    for path, value in values.items():
        *sections, last = path.split(".")
        place = made
        for name in sections:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = value
    return made


def read_json(file: Path) -> dict[str, Any] | None:
    """What a file holds; None where there is no file, or none that was written to its end."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
