"""Which modules read a key of the config, found in the package's sources by the names of attributes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed.config.model import NoEffect, NotBuilt
from deepspeed.config.schema import Schema
from deepspeed.config.schema_walk import Model, keys_of

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
