"""Writes the generated pages of the documentation: `python -m docs.generate`."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import WithJsonSchema

from deepspeed.config.explain import json_schema
from deepspeed.config.features import IDLE, UNBUILT, unused_by_model
from deepspeed.config.model import ConfigModel, Key, keys_of
from deepspeed.config.renamed import REMOVED, RENAMED
from deepspeed.config.schema import Schema

_JSON_TYPES = {"integer": "integer", "string": "text"}
HERE = Path(__file__).resolve().parent
OUT = HERE / "generated"


def main() -> None:
    """Write every generated page."""
    OUT.mkdir(exist_ok=True)
    (OUT / "config.md").write_text("\n".join(config_page()) + "\n", encoding="utf-8")
    (OUT / "deepspeed.schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")


def config_page() -> Iterator[str]:
    """The config reference: a table for the top level and one for each section."""
    yield "# Config reference\n"
    yield "Every key of the JSON config, generated from the schema that validates it."
    yield "`python -m deepspeed.config explain FILE` shows the effective value of each key for your config, and"
    yield "[`deepspeed.schema.json`](deepspeed.schema.json) gives editors completion and checks.\n"
    unbuilt = {feature.path for feature in UNBUILT}
    yield "Keys marked † belong to features that this version lacks; turning one on is an error."
    yield "Those under [keys without effect](#keys-without-effect) log a warning at start.\n"
    top = [keys_of(Schema)[name] for name in Schema.model_fields]
    yield "## Top level\n"
    yield from table([("", key) for key in top if key.section is None], unbuilt)
    for key in top:
        if key.section is not None:
            yield f"\n## `{key.json}`\n"
            if key.info.description:
                yield key.info.description + "\n"
            yield from table(list(members(key.section, key.json + ".")), unbuilt, prefix=key.json + ".")
    yield "\n## Old names\n"
    yield "| old | new |\n|---|---|"
    for row in RENAMED:
        yield f"| `{row.old}` | `{row.new}` |"
    yield "\n## Keys without effect\n"
    yield "| key, or all keys of the section | why |\n|---|---|"
    for note in (*IDLE, *unused_by_model(staged=False, experts=False, shared_sequences=False)):
        yield f"| `{note.path}` | {note.why} |"
    yield "\n## Keys that are errors\n"
    yield "| key | what to do |\n|---|---|"
    for path, advice in REMOVED.items():
        yield f"| `{path}` | {advice} |"


def members(model: type[ConfigModel], prefix: str) -> Iterator[tuple[str, Key]]:
    """The keys of a section and of the sections in it, each with the path of its parent."""
    for name in model.model_fields:
        key = keys_of(model)[name]
        yield prefix, key
        if key.section is not None:
            yield from members(
                key.section, prefix + key.json + {"one": ".", "dict": ".<name>.", "list": "[]."}[key.container]
            )


def table(keys: list[tuple[str, Key]], unbuilt: set[str], prefix: str = "") -> Iterator[str]:
    """Rows of key, type, default, meaning."""
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for parent, key in keys:
        path = parent + key.json
        mark = " †" if path in unbuilt else ""
        default = "" if key.section is not None else f"`{shown(key.info.get_default(call_default_factory=True))}`"
        meaning = (key.info.description or "").replace("|", "\\|")
        yield f"| `{path.removeprefix(prefix)}`{mark} | {kind(key.info.annotation)} | {default} | {meaning} |"


def shown(value: Any) -> str:
    value = getattr(value, "value", value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def kind(annotation: Any) -> str:
    """A type in a reader's words."""
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " / ".join(f"`{json.dumps(item)}`" for item in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(item) for item in arguments))
    if origin is Annotated:
        told = next((one.json_schema for one in arguments[1:] if isinstance(one, WithJsonSchema)), None) or {}
        types_told = [_JSON_TYPES[option["type"]] for option in told.get("anyOf", ())]
        return " or ".join(types_told) or kind(arguments[0])
    if origin in (list, tuple):
        return "list"
    if origin is dict or annotation is dict:
        return "object"
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return "object"
    names = {"int": "integer", "float": "number", "str": "text", "bool": "boolean", "Any": "any"}
    label = getattr(annotation, "__name__", str(annotation))
    if hasattr(annotation, "__members__"):
        return " / ".join(f"`{json.dumps(member.value)}`" for member in annotation)
    return names.get(label, label)


if __name__ == "__main__":
    main()
