"""What a config means: every effective value and where it came from; and the JSON Schema for editors."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.config.batch import MICRO, STEPS, TRAIN, batch_of
from deepspeed.config.model import ConfigModel, Model, NoEffect, NotBuilt, keys_of
from deepspeed.config.renamed import RENAMED
from deepspeed.config.schema import Schema

if TYPE_CHECKING:
    from deepspeed.config.load import Loaded

_SECRET = ("api_key", "apikey", "token", "password", "secret")


@dataclass(frozen=True)
class ExplainedValue:
    """One value: its dotted path, what it is now, where that came from."""

    path: str
    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        """True if the user had no part in it."""
        return self.origin == "default"


def rows(loaded: Loaded, batch: dict[str, int] | None = None) -> Iterator[ExplainedValue]:
    """The rows of a loaded config; `batch` holds batch sizes that were derived from the others."""
    derived = {**_derived(loaded.schema), **{key: (value, "derived") for key, value in (batch or {}).items()}}
    for path, value in values_of(loaded.schema):
        origin = _origin(path, loaded)
        if origin == "default" and path in derived:
            value, origin = derived[path]
        yield ExplainedValue(path, mask(path, value), origin)


def mask(path: str, value: Any) -> Any:
    """The value, unless its key says that it is a secret."""
    name = path.rpartition(".")[2].lower()
    return "***" if value and name.endswith(_SECRET) else value


def without_secrets(raw: Any, path: str = "") -> Any:
    """A raw config to show or to store: secrets are masked, everything else is as it was given."""
    if isinstance(raw, dict):
        return {key: without_secrets(value, f"{path}.{key}") for key, value in raw.items()}
    if isinstance(raw, list):
        return [without_secrets(value, path) for value in raw]
    return mask(path, raw)


def values_of(model: ConfigModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a model and of the sections in it: dotted path, value."""
    for name in type(model).model_fields:
        key = keys_of(type(model))[name]
        path, value = f"{prefix}{key.json}", getattr(model, name)
        if isinstance(value, ConfigModel):
            yield from values_of(value, path + ".")
        elif key.section is not None and isinstance(value, dict) and value:
            for label, item in value.items():
                yield from values_of(item, f"{path}.{label}.")
        elif key.section is not None and isinstance(value, (list, tuple)) and value:
            for index, item in enumerate(value):
                yield from values_of(item, f"{path}[{index}].")
        elif key.free and isinstance(value, dict) and value:
            yield from ((f"{path}.{label}", item) for label, item in value.items())
        else:
            yield path, value
    yield from ((f"{prefix}{name}", value) for name, value in (model.model_extra or {}).items())


def _origin(path: str, loaded: Loaded) -> str:
    for new, old in loaded.renamed.items():
        if path == new or path.startswith(new + "."):
            return f"renamed from {old}"
    if path in loaded.autos:
        return 'default (was "auto")'
    spelled = loaded.given.get(path)
    if spelled is None:
        return "default"
    return "given" if spelled == path else f"given as {spelled}"


def _derived(schema: Schema) -> dict[str, tuple[Any, str]]:
    """Values that are null in the schema and follow from others."""
    table: dict[str, tuple[Any, str]] = {}
    if schema.zero_optimization.overlap_comm is None:
        table["zero_optimization.overlap_comm"] = (schema.zero_optimization.overlaps_comm, "derived: null is yes")
    if schema.communication_data_type is None:
        precision = "fp16" if schema.fp16.enabled else "bf16" if schema.bf16.enabled else "fp32"
        table["communication_data_type"] = (precision, "derived from the precision")
    return table


def batch_values(loaded: Loaded, ranks: int) -> dict[str, int]:
    """The batch keys that were not given, resolved for that many data-parallel ranks."""
    batch = batch_of(loaded.schema, ranks)
    values = {TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.steps}
    return {key: value for key, value in values.items() if key in batch.derived}


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


_PACKAGE = Path(__file__).resolve().parents[1]
_NO_READERS = ("runtime.getters", "config.explain", "config.features", "config.readers", "published.old_paths")
_ROOTS = ("schema", "_schema", "config", "_config")  # what the whole config is called


@dataclass(frozen=True)
class _Source:
    """What the text of a module says of attributes; a section in a sentence has no dot before it, and is none."""

    module: str
    attributes: frozenset[str]
    pairs: frozenset[tuple[str, str]]
    """Two names with a dot between them."""
    inner: frozenset[tuple[str, str]]
    """Those with a dot before them, too."""
    assigned: Mapping[str, frozenset[str]]
    """Attribute → the names that it is assigned to."""
    words: frozenset[str]

    def reads(self, parent: str, name: str) -> bool:
        """Whether `name` of the section `parent`, or of the whole config, is read by that or an assigned name."""
        if not parent:
            return any((root, name) in self.pairs for root in _ROOTS)
        return (parent, name) in self.inner or any(
            (alias, name) in self.pairs for alias in self.assigned.get(parent, ())
        )


def _sources() -> list[_Source]:
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        if module in _NO_READERS or not re.search("[Cc]onfig|[Ss]chema", text):
            continue
        assigned: dict[str, frozenset[str]] = {}
        for names, value in re.findall(r"^ *([\w., ]+) = (.+)$", text, re.MULTILINE):
            for attribute in re.findall(r"\.(\w+)", value):
                assigned[attribute] = assigned.get(attribute, frozenset()) | set(re.findall(r"\w+", names))
        pairs = frozenset(re.findall(r"\b(\w+)(?=\.(\w+))", text))
        inner = frozenset(re.findall(r"(?<=\.)(\w+)(?=\.(\w+))", text))
        words, attributes = frozenset(re.findall(r"\w+", text)), frozenset(re.findall(r"\.(\w+)", text))
        found.append(_Source(module, attributes, pairs, inner, assigned, words))
    return found


def _modules(sources: list[_Source], model: Model, parent: str, name: str) -> tuple[str, ...]:
    """The modules that read `name` of the section `parent`; those of the config itself only where no other does."""
    exact = [each for each in sources if each.reads(parent, name)]
    typed = [each for each in sources if name in each.attributes and parent and model.__name__ in each.words]
    loose = [each for each in sources if name in each.attributes and parent in each.words]
    unmarked = not any(isinstance(mark, (NoEffect, NotBuilt)) for mark in model.model_fields[name].metadata)
    by_text = [each for each in sources if unmarked and parent in each.attributes]  # getattr(section, name)
    found = {each.module: None for each in (*exact, *typed) or loose or by_text}
    outside = [module for module in found if not module.startswith("config.")]
    return tuple(outside or found)


def _keys(model: Model, prefix: str = "", parent: str = "") -> Iterator[tuple[str, tuple[Model, str, str]]]:
    for name in model.model_fields:
        key = keys_of(model)[name]
        path = f"{prefix}{key.json}"
        yield path, (model, parent, name)
        if key.section is not None:
            yield from _keys(key.section, path + ("[]." if key.container == "list" else "."), name)


@functools.cache
def _readers() -> dict[str, tuple[str, ...]]:
    sources = _sources()
    return {path: _modules(sources, *where) for path, where in _keys(Schema)}


def readers_of(path: str) -> tuple[str, ...]:
    """The modules, below `deepspeed`, that read the key at a dotted path; a key in a free object is read with it."""
    known = re.sub(r"\[\d+\]", "[]", path)
    while known and known not in _readers():
        known = known.rpartition(".")[0]
    return _readers().get(known, ())
