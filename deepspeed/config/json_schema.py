"""The config as a JSON Schema that editors use for completion, hints and squiggles."""

from __future__ import annotations

from typing import Any

from deepspeed.config.renamed import RENAMED
from deepspeed.config.schema import Schema

__all__ = ["json_schema"]

_AUTO = {"const": "auto", "description": "filled in by Transformers' Trainer or by Accelerate"}


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the whole config.

    Beyond the models it allows what the loader allows: "auto", `null` for "not set", comment keys, old names.
    """
    schema = Schema.model_json_schema(by_alias=True, mode="validation")
    for model in [schema, *schema.get("$defs", {}).values()]:
        if "properties" in model:
            _loosen(model)
    for row in RENAMED:
        if "." not in row.old:
            schema["properties"][row.old] = {"deprecated": True, "description": f"old name of {row.new!r}"}
    schema["properties"]["$schema"] = {"type": "string"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "DeepSpeed config",
        "description": "The JSON config of deepspeed.initialize(config=...).",
    }


def _loosen(model: dict[str, Any]) -> None:
    model.pop("title", None)
    model["patternProperties"] = {"^(_|//|#)": {}}
    for key, value in model["properties"].items():
        value.pop("title", None)
        about = {name: value.pop(name) for name in ("description", "default") if name in value}
        options = value.pop("anyOf", None) or [value]
        have = [option.get("const") for option in options]
        extra = (
            [_AUTO] if "auto" not in have and not any("auto" in option.get("enum", ()) for option in options) else []
        )
        if not any(option.get("type") == "null" for option in options):
            extra.append({"type": "null"})
        model["properties"][key] = {**about, "anyOf": [*options, *extra]}
